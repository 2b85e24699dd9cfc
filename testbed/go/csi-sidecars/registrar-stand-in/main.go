// Command registrar-stand-in stands in for kubernetes-csi/node-driver-registrar, which the Go module proxy does not serve:
// it names a CSI driver to the node agent, and does nothing else.
package main

import (
	"context"
	"flag"
	"log"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

var (
	csiAddress       = flag.String("csi-address", "/csi/csi.sock", "the driver's socket, as this process sees it")
	registrationPath = flag.String("kubelet-registration-path", "", "the driver's socket, as the node agent sees it")
	registrationDir  = flag.String("plugin-registration-path", "/registration", "the directory of the agent's watcher")
	timeout          = flag.Duration("timeout", time.Second, "of one call to the driver")
	_                = flag.Int("v", 0, "without effect; the original's manifests have it")
	_                = flag.String("feature-gates", "", "without effect; as v")
)

func main() {
	flag.Parse()
	driver := driverName()
	socket := filepath.Join(*registrationDir, driver+"-reg.sock")
	if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
		log.Fatal(err)
	}
	// Only root may connect.
	mask := syscall.Umask(0o077)
	listener, err := net.Listen("unix", socket)
	if err != nil {
		log.Fatal(err)
	}
	syscall.Umask(mask)
	server := grpc.NewServer()
	registration.RegisterRegistrationServer(server, &registrar{driver: driver})
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, os.Interrupt)
	go func() {
		<-stop
		// Removes the socket, by which the agent learns of it.
		server.Stop()
	}()
	log.Printf("serving %s on %s", driver, socket)
	if err := server.Serve(listener); err != nil {
		log.Fatal(err)
	}
}

// driverName asks the driver until it answers.
func driverName() string {
	connection, err := grpc.NewClient("unix://"+*csiAddress, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	for {
		ctx, cancel := context.WithTimeout(context.Background(), *timeout)
		info, err := csi.NewIdentityClient(connection).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}, grpc.WaitForReady(true))
		cancel()
		if err == nil {
			return info.GetName()
		}
		log.Printf("the driver does not answer yet: %v", err)
		time.Sleep(100 * time.Millisecond)
	}
}

type registrar struct {
	registration.UnsafeRegistrationServer
	driver string
}

func (r *registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type:              registration.CSIPlugin,
		Name:              r.driver,
		Endpoint:          *registrationPath,
		SupportedVersions: []string{"1.0.0"},
	}, nil
}

// NotifyRegistrationStatus ends this process after a refusal: it starts again and is looked at again.
func (r *registrar) NotifyRegistrationStatus(_ context.Context, status *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	log.Printf("the node agent says: registered %t %s", status.GetPluginRegistered(), status.GetError())
	if !status.GetPluginRegistered() {
		os.Exit(1)
	}
	return &registration.RegistrationStatusResponse{}, nil
}
