// A complete rollout worker, built from the generated stubs and Go's gRPC library only.
//
//	main      configuration, signals, exit codes
//	session   who this process is; which calls are made again, and how long
//	faults    what a failed call means
//	reporter  numbered batches up, acknowledgements and notices down
//	batch     reports as packed columns, within the controller's limits
//	worker    leases groups and generates them
package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log"
	"math"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	pb "cosmosctrl/v1"
)

// Exit codes. A launcher restarts a process after none of them but exitError.
const (
	exitConfiguration = 2
	exitStale         = 10
	exitError         = 11
)

// How long the last acknowledgement may take.
const endTimeout = 10 * time.Second

type config struct {
	address     string
	executionID string
	group       string
	replica     uint32
	inFlight    int
}

func main() {
	log.SetFlags(0)
	log.SetPrefix("worker: ")
	configuration, err := configure()
	if err != nil {
		log.Print(err)
		os.Exit(exitConfiguration)
	}
	err = run(configuration)
	var over *over
	switch {
	case err == nil:
	case errors.As(err, &over):
		log.Print(over)
		os.Exit(over.code)
	default:
		log.Print(err)
		os.Exit(exitError)
	}
}

func configure() (config, error) {
	c := config{
		address:     os.Getenv("COSMOS_CTRL_ADDRESS"),
		executionID: os.Getenv("COSMOS_CTRL_EXECUTION_ID"),
		group:       setting("COSMOS_CTRL_GROUP", "rollout"),
	}
	if c.address == "" {
		return c, errors.New("COSMOS_CTRL_ADDRESS is not set: the controller's host:port")
	}
	replica, err := strconv.ParseUint(setting("COSMOS_CTRL_REPLICA", "0"), 10, 32)
	if err != nil {
		return c, fmt.Errorf("COSMOS_CTRL_REPLICA: %w", err)
	}
	inFlight, err := strconv.ParseUint(setting("COSMOS_CTRL_IN_FLIGHT", "8"), 10, 16)
	if err != nil || inFlight == 0 {
		return c, fmt.Errorf("COSMOS_CTRL_IN_FLIGHT is %q: a number of groups from 1 to 65535", os.Getenv("COSMOS_CTRL_IN_FLIGHT"))
	}
	c.replica, c.inFlight = uint32(replica), int(inFlight)
	return c, nil
}

func setting(name, otherwise string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return otherwise
}

// run works until there is no more, or SIGTERM; then it says that it ends, and waits until that is acknowledged.
func run(c config) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stopping := stopOnSignal(ctx)
	connection, err := dial(c.address)
	if err != nil {
		return err
	}
	defer connection.Close()

	session := newSession(pb.NewControllerServiceClient(connection), registration(c))
	reporter := newReporter(session)
	worker := newWorker(session, reporter, c.inFlight)
	if err := session.register(stopping, ""); err != nil {
		return unlessStopped(stopping, err)
	}
	broken, worked := make(chan error, 1), make(chan error, 1)
	go func() { broken <- reporter.run(ctx) }()
	go func() { worked <- worker.run(ctx, stopping) }()
	select {
	case err := <-broken:
		return err
	case err := <-worked:
		if err != nil {
			return err
		}
	}
	reason := "nothing more to do"
	if stopping.Err() != nil {
		reason = "terminated"
	}
	select {
	case err := <-broken:
		return err
	case <-reporter.finish(reason):
		return nil
	case <-time.After(endTimeout):
		return fmt.Errorf("the end was not acknowledged within %v", endTimeout)
	}
}

// stopOnSignal returns a context that SIGTERM ends. The second one ends the process.
func stopOnSignal(ctx context.Context) context.Context {
	stopping, stop := context.WithCancel(ctx)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM)
	go func() {
		<-signals
		stop()
		<-signals
		log.Print("terminated twice")
		os.Exit(exitError)
	}()
	return stopping
}

// unlessStopped is nil for a process that was told to stop before it held anything.
func unlessStopped(stopping context.Context, err error) error {
	if stopping.Err() != nil {
		return nil
	}
	return err
}

func dial(address string) (*grpc.ClientConn, error) {
	// A controller that was away is looked for as often as our own calls are made again; the default is up to two minutes.
	reconnect := backoff.Config{BaseDelay: backoffFirst, Multiplier: 2, Jitter: 0.5, MaxDelay: backoffMost}
	return grpc.Dial(
		address,
		grpc.WithInsecure(),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: reconnect, MinConnectTimeout: callTimeout}),
		// The controller's limit is told at registration and kept by it; the library's own is 4 MiB.
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32)),
	)
}

func registration(c config) *pb.RegisterWorkerRequest {
	incarnation := make([]byte, 16)
	if _, err := rand.Read(incarnation); err != nil {
		panic(err)
	}
	host, _ := os.Hostname() // for people only
	return &pb.RegisterWorkerRequest{
		ExecutionId: c.executionID,
		Role:        pb.Role_ROLE_ROLLOUT,
		Group:       c.group,
		Replica:     c.replica,
		WorldSize:   1,
		Incarnation: hex.EncodeToString(incarnation),
		Host:        host,
		Pid:         uint32(os.Getpid()),
	}
}
