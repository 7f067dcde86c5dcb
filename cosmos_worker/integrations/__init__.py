"""Other people's trainers, with checkpoints that are committed or absent. Each module needs the extra of its own name."""
