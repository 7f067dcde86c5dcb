package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand"
	"strconv"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "cosmosctrl/v1"
)

const (
	// Domain of the controller's own ErrorInfo. A status without one is the library's.
	domain = "cosmos_ctrl.v1"

	// Without any answer for so long, the controller is taken for gone.
	giveUpAfter = 30 * time.Second

	backoffFirst = 50 * time.Millisecond
	backoffMost  = 2 * time.Second
)

// over ends the process.
type over struct {
	code int
	text string
}

func (o *over) Error() string { return o.text }

func failed(format string, arguments ...interface{}) *over {
	return &over{exitError, fmt.Sprintf(format, arguments...)}
}

type faultKind int

const (
	final       faultKind = iota // ends the process
	unreachable                  // no answer: send the same again
	later                        // an answer with RetryInfo: wait that long at least, then send the same again
	lapsed                       // the session is gone: register, then send the same again
	gap                          // batches are missing: send again from the one that is expected
)

// fault is a failed call, classified.
type fault struct {
	kind     faultKind
	over     *over         // final, and what is said when the others cannot be cured
	delay    time.Duration // later: at least so long
	expected uint64        // gap: the next number
}

func faultOf(err error) fault {
	var known *over
	if errors.As(err, &known) {
		return fault{over: known}
	}
	s := status.Convert(err)
	info, retry := details(s)
	if info == nil {
		return libraryFault(s)
	}
	f := fault{over: failed("%s: %s", info.Reason, s.Message())}
	if retry != nil { // also a reason that this client does not know
		f.kind, f.delay = later, retry.RetryDelay.AsDuration()
	}
	switch pb.ErrorReason(pb.ErrorReason_value["ERROR_REASON_"+info.Reason]) {
	case pb.ErrorReason_ERROR_REASON_STALE_EXECUTION, pb.ErrorReason_ERROR_REASON_SUPERSEDED:
		f.over.code = exitStale
	case pb.ErrorReason_ERROR_REASON_EXECUTION_ENDED:
		if info.Metadata["end_reason"] != "FAILURE" {
			f.over.code = 0
		}
	case pb.ErrorReason_ERROR_REASON_NOT_REGISTERED:
		f.kind = lapsed
	case pb.ErrorReason_ERROR_REASON_SEQUENCE_GAP:
		if expected, err := strconv.ParseUint(info.Metadata["expected"], 10, 64); err == nil && expected > 0 {
			f.kind, f.expected = gap, expected
		}
	}
	return f
}

func libraryFault(s *status.Status) fault {
	f := fault{over: failed("%v without the controller's ErrorInfo: %s", s.Code(), s.Message())}
	switch s.Code() {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled: // Canceled: the server is going down
		f.kind = unreachable
	case codes.Internal:
		// Also a server that goes down; the library's text tells it from a status that was sent.
		if strings.Contains(s.Message(), "terminated by RST_STREAM") {
			f.kind = unreachable
		}
	}
	return f
}

func details(s *status.Status) (info *errdetails.ErrorInfo, retry *errdetails.RetryInfo) {
	for _, detail := range s.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.Domain == domain {
				info = detail
			}
		case *errdetails.RetryInfo:
			retry = detail
		}
	}
	return info, retry
}

// patience is how long one call, or one stream after the other, is tried: exponential pauses with jitter, and an end.
type patience struct {
	attempts    int
	silentSince time.Time // zero while there are answers
}

// begin notes that an attempt is made: from now on an answer is waited for.
func (p *patience) begin() {
	if p.silentSince.IsZero() {
		p.silentSince = time.Now()
	}
}

// answered notes that a call went well.
func (p *patience) answered() { *p = patience{} }

// recover waits until the same may be sent again, or returns what ends the process. A lapsed session and a gap are the
// caller's to cure.
func (p *patience) recover(ctx context.Context, f fault) error {
	switch f.kind {
	case unreachable:
		p.begin()
		if silent := time.Since(p.silentSince); silent >= giveUpAfter {
			return failed("no answer from the controller for %v: %v", silent.Round(time.Second), f.over)
		}
		return p.pause(ctx, 0)
	case later:
		p.silentSince = time.Time{}
		return p.pause(ctx, f.delay)
	default:
		return f.over
	}
}

func (p *patience) pause(ctx context.Context, least time.Duration) error {
	most := backoffMost
	if p.attempts < 6 { // 50 ms doubled six times is beyond the most
		most = backoffFirst << p.attempts
	}
	p.attempts++
	delay := most/2 + time.Duration(rand.Int63n(int64(most/2)))
	if delay < least {
		delay = least
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(delay):
		return nil
	}
}
