package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	pb "cosmosctrl/v1"
)

// An answer takes at most so long, beyond what the call itself asks the controller to wait.
const callTimeout = 5 * time.Second

// session is this process before its controller. The execution ID is pinned for the process's life: as it was launched,
// else as the first registration tells. Registering again opens another session of the same incarnation.
type session struct {
	client pb.ControllerServiceClient
	// Called with every registration, before anything is sent in the new session.
	onRegistered func(*pb.RegisterWorkerResponse) error

	registering sync.Mutex // one registration at a time
	request     *pb.RegisterWorkerRequest
	refused     *over // nobody asks again

	mu          sync.Mutex
	pinned      bool
	executionID string
	sessionID   string
}

func newSession(client pb.ControllerServiceClient, request *pb.RegisterWorkerRequest) *session {
	return &session{
		client:      client,
		request:     request,
		pinned:      request.ExecutionId != "",
		executionID: request.ExecutionId,
	}
}

func (s *session) identity() *pb.WorkerIdentity {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &pb.WorkerIdentity{ExecutionId: s.executionID, SessionId: s.sessionID}
}

// check compares an answer's execution with the pinned one: another one is another controller, to which nothing is said.
func (s *session) check(header *pb.ResponseHeader) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.pinned {
		s.pinned, s.executionID = true, header.GetExecutionId()
	}
	if found := header.GetExecutionId(); found != s.executionID {
		return &over{exitStale, fmt.Sprintf("execution %q answered; this process belongs to %q", found, s.executionID)}
	}
	return nil
}

// register opens a session, unless there is another one than stale already.
func (s *session) register(ctx context.Context, stale string) error {
	s.registering.Lock()
	defer s.registering.Unlock()
	if s.refused != nil {
		return s.refused
	}
	identity := s.identity()
	if identity.SessionId != stale {
		return nil
	}
	s.request.ExecutionId = identity.ExecutionId
	var response *pb.RegisterWorkerResponse
	var p patience
	for {
		err := s.attempt(ctx, &p, callTimeout, func(ctx context.Context) (header *pb.ResponseHeader, err error) {
			response, err = s.client.RegisterWorker(ctx, s.request)
			return response.GetHeader(), err
		})
		if err == nil {
			break
		}
		if err := p.recover(ctx, faultOf(err)); err != nil {
			errors.As(err, &s.refused)
			return err
		}
	}
	s.mu.Lock()
	s.sessionID = response.SessionId
	s.mu.Unlock()
	return s.onRegistered(response)
}

// call makes a fenced call until it is answered, with the present session and a deadline each time.
//
// Once until is done, an attempt that fails is the last.
func (s *session) call(
	ctx, until context.Context, wait time.Duration,
	send func(context.Context, *pb.WorkerIdentity) (*pb.ResponseHeader, error),
) error {
	var p patience
	for {
		identity := s.identity()
		err := s.attempt(ctx, &p, callTimeout+wait, func(ctx context.Context) (*pb.ResponseHeader, error) {
			return send(ctx, identity)
		})
		if err == nil {
			return nil
		}
		if err := s.recover(until, &p, faultOf(err), identity.SessionId); err != nil {
			return err
		}
	}
}

func (s *session) attempt(
	ctx context.Context, p *patience, timeout time.Duration, send func(context.Context) (*pb.ResponseHeader, error),
) error {
	p.begin()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	header, err := send(ctx)
	if err != nil {
		return err
	}
	return s.check(header)
}

// recover waits until the same may be sent again, in a new session if the stated one has lapsed.
func (s *session) recover(ctx context.Context, p *patience, f fault, session string) error {
	if f.kind != lapsed {
		return p.recover(ctx, f)
	}
	// A controller that forgets every session at once is not asked without pause.
	f.kind = later
	if err := p.recover(ctx, f); err != nil {
		return err
	}
	return s.register(ctx, session)
}
