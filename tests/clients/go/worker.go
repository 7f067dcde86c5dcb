package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	pb "cosmosctrl/v1"
)

const (
	// How long the controller may wait for work before it answers that there is none. SIGTERM waits for that, too.
	leaseWait = 2 * time.Second

	// A controller that has nothing, at once, is asked again after this.
	emptyPause = 50 * time.Millisecond
)

// worker leases groups and generates each in a goroutine of its own. A group holds its place until it is reported, so
// that no more is leased than can be reported.
type worker struct {
	session  *session
	reporter *reporter
	places   chan struct{} // one for each group that may be leased now
	groups   sync.WaitGroup

	mu      sync.Mutex
	held    map[uint64]context.CancelFunc // by lease
	seen    map[string]bool               // prompts that were returned once
	weights uint64                        // newest version
}

func newWorker(session *session, reporter *reporter, inFlight int) *worker {
	w := &worker{
		session:  session,
		reporter: reporter,
		places:   make(chan struct{}, inFlight),
		held:     map[uint64]context.CancelFunc{},
		seen:     map[string]bool{},
	}
	for i := 0; i < inFlight; i++ {
		w.places <- struct{}{}
	}
	reporter.onCancelled = w.drop
	return w
}

// run works until there is nothing more, or stopping is done; then nothing is held that was not handed to the reporter.
func (w *worker) run(ctx, stopping context.Context) error {
	if err := w.lease(ctx, stopping); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	w.groups.Wait()
	return nil
}

func (w *worker) lease(ctx, stopping context.Context) error {
	for number := uint64(1); ; number++ {
		free := w.takePlaces(stopping)
		if stopping.Err() != nil {
			return nil
		}
		response, err := w.ask(ctx, stopping, number, free)
		if err != nil {
			return err
		}
		if len(response.Groups) > free {
			return failed("%d groups were leased, %d asked for", len(response.Groups), free)
		}
		w.start(ctx, stopping, response)
		for i := len(response.Groups); i < free; i++ {
			w.places <- struct{}{}
		}
		if response.NoMore {
			return nil
		}
	}
}

// takePlaces takes every free place, and waits until there is one.
func (w *worker) takePlaces(stopping context.Context) int {
	select {
	case <-stopping.Done():
		return 0
	case <-w.places:
	}
	for taken := 1; ; taken++ {
		select {
		case <-w.places:
		default:
			return taken
		}
	}
}

func (w *worker) ask(ctx, stopping context.Context, number uint64, groups int) (*pb.LeasePromptsResponse, error) {
	var response *pb.LeasePromptsResponse
	asked := time.Now()
	// The request in flight ends by itself after SIGTERM, so that no group is leased to a process that is gone.
	err := w.session.call(ctx, stopping, leaseWait, func(
		ctx context.Context, identity *pb.WorkerIdentity,
	) (header *pb.ResponseHeader, err error) {
		response, err = w.session.client.LeasePrompts(ctx, &pb.LeasePromptsRequest{
			Worker:    identity,
			Number:    number,
			MaxGroups: uint32(groups),
			Wait:      durationpb.New(leaseWait),
		})
		return response.GetHeader(), err
	})
	if err == nil && len(response.Groups) == 0 && !response.NoMore && time.Since(asked) < emptyPause {
		time.Sleep(emptyPause)
	}
	return response, err
}

func (w *worker) start(ctx, stopping context.Context, response *pb.LeasePromptsResponse) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if version := response.Weights.GetVersion(); version > w.weights {
		w.weights = version // a real worker loads them before it generates
	}
	for _, group := range response.Groups {
		generating, drop := context.WithCancel(stopping)
		w.held[group.Lease] = drop
		w.groups.Add(1)
		go w.handle(ctx, generating, group, w.weights)
	}
}

func (w *worker) handle(ctx, generating context.Context, group *pb.LeasedGroup, version uint64) {
	defer w.groups.Done()
	defer func() { w.places <- struct{}{} }()
	report := w.work(generating, group, version)
	if !w.forget(group.Lease) {
		return // cancelled
	}
	select {
	case <-w.reporter.report(report):
	case <-ctx.Done():
	}
}

// work does what the prompt's source says. generating is done when the lease is cancelled, or the process ends.
func (w *worker) work(generating context.Context, group *pb.LeasedGroup, version uint64) *report {
	switch group.Source {
	case "fail":
		report := newReport(group, pb.Outcome_OUTCOME_FAILED)
		report.reason = "told_to"
		return report
	case "discard":
		report := newReport(group, pb.Outcome_OUTCOME_DISCARDED)
		report.reason = "told_to"
		return report
	case "return":
		if w.isNew(group.PromptKey) {
			return newReport(group, pb.Outcome_OUTCOME_RETURNED)
		}
	case "hold":
		<-generating.Done()
		return newReport(group, pb.Outcome_OUTCOME_RETURNED)
	}
	return generate(group, version)
}

// generate stands for the model.
func generate(group *pb.LeasedGroup, version uint64) *report {
	report := newReport(group, pb.Outcome_OUTCOME_COMPLETED)
	report.version = version
	for i := range report.left {
		one := &report.left[i]
		one.payload = fmt.Appendf(nil, "%s#%d", group.Payload, one.index)
		one.reward = float64(one.index)
	}
	return report
}

func (w *worker) isNew(prompt string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	before := w.seen[prompt]
	w.seen[prompt] = true
	return !before
}

// forget says whether the lease was still held, and lets go of it.
func (w *worker) forget(lease uint64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	drop, held := w.held[lease]
	if held {
		drop()
		delete(w.held, lease)
	}
	return held
}

// drop stops generating what the controller does not want any more.
func (w *worker) drop(leases []uint64) {
	for _, lease := range leases {
		w.forget(lease)
	}
}
