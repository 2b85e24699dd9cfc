// Command liveness-stand-in stands in for kubernetes-csi/livenessprobe, which the Go module proxy does not serve: it asks a CSI
// driver whether it is well, for whoever asks by HTTP.
package main

import (
	"context"
	"flag"
	"log"
	"net"
	"net/http"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

var (
	csiAddress = flag.String("csi-address", "/csi/csi.sock", "the driver's socket")
	healthPort = flag.String("health-port", "9808", "where /healthz is served")
	timeout    = flag.Duration("probe-timeout", time.Second, "of one call to the driver")
	_          = flag.Int("v", 0, "without effect; the original's manifests have it")
	_          = flag.String("feature-gates", "", "without effect; as v")
)

func main() {
	flag.Parse()
	http.HandleFunc("/healthz", func(to http.ResponseWriter, request *http.Request) {
		ctx, cancel := context.WithTimeout(request.Context(), *timeout)
		defer cancel()
		if why := fault(ctx); why != "" {
			http.Error(to, why, http.StatusInternalServerError)
		}
	})
	server := http.Server{Addr: net.JoinHostPort("", *healthPort), ReadHeaderTimeout: *timeout}
	log.Fatal(server.ListenAndServe())
}

// fault is empty for a driver that is well. Each call has a connection of its own: one that is kept would wait longer and longer
// before it finds a driver that started again.
func fault(ctx context.Context) string {
	connection, err := grpc.NewClient("unix://"+*csiAddress, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err.Error()
	}
	defer connection.Close()
	answer, err := csi.NewIdentityClient(connection).Probe(ctx, &csi.ProbeRequest{})
	switch {
	case err != nil:
		return err.Error()
	case answer.GetReady() != nil && !answer.GetReady().GetValue():
		return "the driver is not ready"
	}
	return ""
}
