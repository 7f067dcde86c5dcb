"""Other people's trainers, with checkpoints that are committed or absent. `huggingface` needs the extra of that name."""
