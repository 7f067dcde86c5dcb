package main

import (
	"context"
	"io"
	"log"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "cosmosctrl/v1"
)

// A stream is opened anew after so long, so that it has a deadline like every other call.
const streamLifetime = 10 * time.Minute

// reporter sends reports in numbered batches. A batch once formed never changes; it is sent again, in order, on every new
// stream until it is acknowledged. Unacknowledged batches are bounded by the controller's limit, and reports that wait by
// whoever waits for them.
type reporter struct {
	session     *session
	onCancelled func(leases []uint64)

	wake  chan struct{} // something may be sent
	ended chan struct{} // the end report is acknowledged

	mu        sync.Mutex
	limits    *pb.Limits
	leaseTime time.Duration
	waiting   []*report         // in no batch, or not wholly
	window    []*pb.ReportBatch // not acknowledged
	sent      int               // how many of the window went out on this stream
	numbered  uint64
	applied   uint64
	notices   uint64 // handled
	owed      int    // answers that the stream owes
	end       *pb.EndReport
	endNumber uint64 // batch that carries the end
}

func newReporter(session *session) *reporter {
	r := &reporter{session: session, wake: make(chan struct{}, 1), ended: make(chan struct{})}
	session.onRegistered = r.onRegistered
	return r
}

// report queues; batched is closed once all of it is in a batch, or its lease was cancelled.
func (r *reporter) report(one *report) (batched <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waiting = append(r.waiting, one)
	r.poke()
	return one.batched
}

// finish says that this worker has ended, after all reports; the channel is closed once that is acknowledged.
func (r *reporter) finish(reason string) <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.end = &pb.EndReport{Reason: reason}
	r.poke()
	return r.ended
}

// run keeps a stream open until ctx is done, or until an error is final.
func (r *reporter) run(ctx context.Context) error {
	var p patience
	for {
		session := r.session.identity().SessionId
		p.begin()
		f := faultOf(r.stream(ctx, &p))
		if f.kind == gap {
			if err := r.rewind(f.expected - 1); err != nil {
				return err
			}
			f.kind = unreachable
		}
		if err := r.session.recover(ctx, &p, f, session); err != nil {
			return err
		}
	}
}

// stream runs one stream to its end, and says why it ended.
func (r *reporter) stream(ctx context.Context, p *patience) error {
	ctx, cancel := context.WithTimeout(ctx, streamLifetime)
	defer cancel()
	stream, err := r.session.client.StreamReports(ctx)
	if err != nil {
		return err
	}
	overdue := time.AfterFunc(callTimeout, cancel) // the first message goes out at once
	defer overdue.Stop()
	r.restart()
	received := make(chan error, 1)
	go func() {
		// Ends the sender, too: what is wrong with an answer is known here first.
		defer cancel()
		received <- r.receive(stream, p, overdue)
	}()
	// Fires at once: the answer to a new stream's first message says whether the session lives.
	heartbeat := time.NewTimer(0)
	defer heartbeat.Stop()
	for due := false; ; {
		if request := r.request(due); request != nil {
			heartbeat.Reset(r.heartbeat())
			r.owe(overdue)
			if stream.Send(request) != nil { // the reason is the receiver's to learn
				return <-received
			}
			due = false
			continue
		}
		select {
		case err := <-received:
			return err
		case <-r.wake:
		case <-heartbeat.C:
			due = true
		}
	}
}

// request is the next batch to send; without one a heartbeat if it is due, else nil.
func (r *reporter) request(due bool) *pb.StreamReportsRequest {
	identity := r.session.identity()
	r.mu.Lock()
	defer r.mu.Unlock()
	batch := r.next()
	if batch == nil && !due {
		return nil
	}
	return &pb.StreamReportsRequest{
		Worker:         identity,
		AckedThrough:   r.applied,
		NoticesThrough: r.notices,
		Batch:          batch,
	}
}

func (r *reporter) next() *pb.ReportBatch {
	if r.sent == len(r.window) {
		if !r.mayForm() {
			return nil
		}
		r.window = append(r.window, r.form())
	}
	r.sent++
	return r.window[r.sent-1]
}

func (r *reporter) mayForm() bool {
	if len(r.waiting) == 0 && (r.end == nil || r.endNumber != 0) {
		return false
	}
	return len(r.window) == 0 || len(r.window) < int(r.limits.GetMaxUnacknowledgedBatches())
}

func (r *reporter) form() *pb.ReportBatch {
	r.numbered++
	builder := newBatchBuilder(r.numbered, r.limits)
	for len(r.waiting) > 0 && builder.add(r.waiting[0]) {
		close(r.waiting[0].batched)
		r.waiting = r.waiting[1:]
	}
	if len(r.waiting) == 0 && r.end != nil {
		builder.batch.End, r.endNumber = r.end, r.numbered
	}
	return builder.batch
}

func (r *reporter) receive(stream pb.ControllerService_StreamReportsClient, p *patience, overdue *time.Timer) error {
	for {
		response, err := stream.Recv()
		if err == io.EOF {
			return status.Error(codes.Unavailable, "the controller closed the report stream")
		}
		if err != nil {
			return err
		}
		if err := r.session.check(response.Header); err != nil {
			return err
		}
		p.answered()
		if err := r.onAck(response.Ack, overdue); err != nil {
			return err
		}
	}
}

func (r *reporter) onAck(ack *pb.ReportAck, overdue *time.Timer) error {
	cancelled, err := r.take(ack, overdue)
	if len(cancelled) > 0 {
		r.onCancelled(cancelled)
	}
	return err
}

// take forgets what is applied and handles the notices that are new; returns the leases that they cancel.
func (r *reporter) take(ack *pb.ReportAck, overdue *time.Timer) (cancelled []uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.owed--
	if r.owed > 0 {
		overdue.Reset(callTimeout)
	} else {
		overdue.Stop()
	}
	for _, notice := range ack.GetNotices() {
		if notice.Number != r.notices+1 {
			continue // handled before
		}
		r.notices = notice.Number
		cancelled = append(cancelled, notice.GetCancelled().GetLeases()...)
		if refused := notice.GetRefused(); refused != nil {
			log.Printf("group %d: a report was refused: %v", refused.Group, refused.Reason)
		}
	}
	r.dropWaiting(cancelled)
	return cancelled, r.acknowledge(ack.GetApplied())
}

func (r *reporter) acknowledge(applied uint64) error {
	if applied > r.numbered {
		return failed("the controller acknowledges batch %d; only %d were sent", applied, r.numbered)
	}
	for len(r.window) > 0 && r.window[0].Number <= applied {
		r.window = r.window[1:]
		if r.sent > 0 {
			r.sent--
		}
	}
	if applied > r.applied {
		r.applied = applied
	}
	if r.endNumber != 0 && r.applied >= r.endNumber {
		r.end, r.endNumber = nil, 0
		close(r.ended)
	}
	r.poke()
	return nil
}

func (r *reporter) onRegistered(response *pb.RegisterWorkerResponse) error {
	r.mu.Lock()
	r.limits, r.leaseTime = response.Limits, response.LeaseTime.AsDuration()
	r.mu.Unlock()
	return r.rewind(response.Applied)
}

// rewind sends what is beyond applied again.
func (r *reporter) rewind(applied uint64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if applied < r.applied {
		return failed("the controller has forgotten batch %d, which it had acknowledged", applied+1)
	}
	r.sent = 0
	return r.acknowledge(applied)
}

// restart is for a new stream, which owes nothing and has been sent nothing.
func (r *reporter) restart() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sent, r.owed = 0, 0
}

// owe notes that an answer is due: the stream is given up if it does not come in time.
func (r *reporter) owe(overdue *time.Timer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.owed == 0 {
		overdue.Reset(callTimeout)
	}
	r.owed++
}

func (r *reporter) heartbeat() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.leaseTime / 3
}

func (r *reporter) dropWaiting(leases []uint64) {
	for _, lease := range leases {
		kept := r.waiting[:0]
		for _, one := range r.waiting {
			if one.group.Lease == lease {
				close(one.batched)
			} else {
				kept = append(kept, one)
			}
		}
		r.waiting = kept
	}
}

// poke wakes the sender; it looks for everything there is, so that one wake-up is enough.
func (r *reporter) poke() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}
