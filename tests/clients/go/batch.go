package main

import (
	"math/bits"

	pb "cosmosctrl/v1"
)

const (
	// Bounds of what a message and a completion take beside texts and payloads.
	messageBytes    = 1024
	completionBytes = 96 // with a row and a block of its own
)

// report is what became of the completions of one lease. More than fits into one batch goes on in the next.
type report struct {
	group   *pb.LeasedGroup
	outcome pb.Outcome
	reason  string
	version uint64 // weights that a completed one was generated with

	left    []completion  // not in a batch yet
	batched chan struct{} // closed when there are none
}

type completion struct {
	index   uint32
	payload []byte  // completed only
	reward  float64 // completed only
}

// newReport is about every completion that the lease asks for.
func newReport(group *pb.LeasedGroup, outcome pb.Outcome) *report {
	r := &report{group: group, outcome: outcome, batched: make(chan struct{})}
	for word, mask := range group.Masks {
		for ; mask != 0; mask &= mask - 1 {
			r.left = append(r.left, completion{index: uint32(64*word + bits.TrailingZeros64(mask))})
		}
	}
	return r
}

// batchBuilder fills one batch up to the controller's limits. A single completion always fits: the controller keeps
// prompts small enough for that.
type batchBuilder struct {
	batch       *pb.ReportBatch
	completions int // room
	bytes       int // room
}

func newBatchBuilder(number uint64, limits *pb.Limits) *batchBuilder {
	return &batchBuilder{
		batch:       &pb.ReportBatch{Number: number},
		completions: int(limits.GetMaxBatchCompletions()),
		bytes:       int(limits.GetMaxMessageBytes()) - messageBytes,
	}
}

// add takes as much of the report as there is room for; true: all of it.
func (b *batchBuilder) add(r *report) bool {
	for len(r.left) > 0 {
		one := r.left[0]
		size := completionBytes + len(r.reason) + len(one.payload)
		if len(b.batch.Rollouts) > 0 && (b.completions < 1 || b.bytes < size) {
			return false
		}
		b.append(r, one)
		b.completions--
		b.bytes -= size
		r.left = r.left[1:]
	}
	return true
}

func (b *batchBuilder) append(r *report, one completion) {
	rows, word := b.block(r), one.index/64
	last := len(rows.Groups) - 1
	if last < 0 || rows.Leases[last] != r.group.Lease || rows.Words[last] != word {
		rows.Groups = append(rows.Groups, r.group.Group)
		rows.Leases = append(rows.Leases, r.group.Lease)
		rows.Words = append(rows.Words, word)
		rows.Masks = append(rows.Masks, 0)
		if r.outcome == pb.Outcome_OUTCOME_COMPLETED {
			rows.LowestVersions = append(rows.LowestVersions, r.version)
			rows.HighestVersions = append(rows.HighestVersions, r.version)
		}
		last++
	}
	rows.Masks[last] |= 1 << (one.index % 64)
	if r.outcome == pb.Outcome_OUTCOME_COMPLETED {
		rows.Rewards = append(rows.Rewards, one.reward)
		rows.Payloads = append(rows.Payloads, one.payload)
	}
}

// block is the batch's last block if it is of the report's kind, else a new one: blocks are applied in order.
func (b *batchBuilder) block(r *report) *pb.RolloutRows {
	if n := len(b.batch.Rollouts); n > 0 {
		if last := b.batch.Rollouts[n-1]; last.Outcome == r.outcome && last.Reason == r.reason {
			return last
		}
	}
	rows := &pb.RolloutRows{Outcome: r.outcome, Reason: r.reason}
	if r.outcome == pb.Outcome_OUTCOME_COMPLETED {
		rows.PayloadCodec = "bytes"
	}
	b.batch.Rollouts = append(b.batch.Rollouts, rows)
	return rows
}
