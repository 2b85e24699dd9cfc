// Command attacher-stand-in stands in for kubernetes-csi/external-attacher, of which the Go module proxy serves no version
// that knows storage.k8s.io/v1: it carries out the VolumeAttachments of one CSI driver, one at a time.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/kubernetes-csi/csi-lib-utils/accessmodes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	core "k8s.io/api/core/v1"
	storage "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/workqueue"
)

var (
	kubeconfig = flag.String("kubeconfig", "", "of the API server")
	csiAddress = flag.String("csi-address", "/csi/csi.sock", "the driver's socket")
	timeout    = flag.Duration("timeout", 15*time.Second, "of calls for one attachment")
	_          = flag.Int("v", 0, "without effect; the original's manifests have it")
	_          = flag.String("feature-gates", "", "without effect; as v")
)

type attacher struct {
	driver string
	api    kubernetes.Interface
	// Nil for a driver that attaches nothing: its volumes count as attached.
	controller csi.ControllerClient
}

func main() {
	flag.Parse()
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		log.Fatal(err)
	}
	config.QPS, config.Burst = 50, 100
	connection, err := grpc.NewClient("unix://"+*csiAddress, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	api := kubernetes.NewForConfigOrDie(config)
	ctx := context.Background()
	a := &attacher{driver: driverName(ctx, connection), api: api, controller: controller(ctx, connection)}
	queue := workqueue.NewTypedRateLimitingQueue(
		workqueue.NewTypedItemExponentialFailureRateLimiter[string](100*time.Millisecond, 5*time.Second))
	factory := informers.NewSharedInformerFactory(api, 0)
	informer := factory.Storage().V1().VolumeAttachments().Informer()
	enqueue := func(object any) {
		if attachment, ok := object.(*storage.VolumeAttachment); ok && attachment.Spec.Attacher == a.driver {
			queue.Add(attachment.Name)
		}
	}
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    enqueue,
		UpdateFunc: func(_, object any) { enqueue(object) },
	}); err != nil {
		log.Fatal(err)
	}
	factory.Start(ctx.Done())
	for {
		name, _ := queue.Get()
		if err := a.sync(ctx, name); err != nil {
			log.Printf("%s: %v", name, err)
			queue.AddRateLimited(name)
		} else {
			queue.Forget(name)
		}
		queue.Done(name)
	}
}

// driverName asks the driver until it answers.
func driverName(ctx context.Context, connection *grpc.ClientConn) string {
	for {
		call, cancel := context.WithTimeout(ctx, time.Second)
		info, err := csi.NewIdentityClient(connection).GetPluginInfo(call, &csi.GetPluginInfoRequest{}, grpc.WaitForReady(true))
		cancel()
		if err == nil {
			return info.GetName()
		}
		log.Printf("the driver does not answer yet: %v", err)
		time.Sleep(100 * time.Millisecond)
	}
}

// controller asks the driver, until it answers, whether it attaches volumes.
func controller(ctx context.Context, connection *grpc.ClientConn) csi.ControllerClient {
	controller := csi.NewControllerClient(connection)
	for {
		call, cancel := context.WithTimeout(ctx, *timeout)
		answer, err := controller.ControllerGetCapabilities(call, &csi.ControllerGetCapabilitiesRequest{}, grpc.WaitForReady(true))
		cancel()
		if err == nil {
			return able(controller, answer.GetCapabilities())
		}
		log.Printf("the driver does not say what it can do: %v", err)
		time.Sleep(100 * time.Millisecond)
	}
}

func able(controller csi.ControllerClient, capabilities []*csi.ControllerServiceCapability) csi.ControllerClient {
	for _, capability := range capabilities {
		if capability.GetRpc().GetType() == csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME {
			return controller
		}
	}
	return nil
}

func (a *attacher) finalizer() string {
	return "external-attacher/" + a.driver
}

func (a *attacher) sync(ctx context.Context, name string) error {
	attachment, err := a.api.StorageV1().VolumeAttachments().Get(ctx, name, meta.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, *timeout)
	defer cancel()
	if attachment.DeletionTimestamp != nil {
		return a.detach(ctx, attachment)
	}
	if attachment.Status.Attached {
		return nil
	}
	if a.controller == nil {
		return a.patchStatus(ctx, name, map[string]any{"attached": true})
	}
	metadata, err := a.attach(ctx, attachment)
	if err != nil {
		code := int32(status.Code(err))
		refused := &storage.VolumeError{Time: meta.Now(), Message: err.Error(), ErrorCode: &code}
		return errorsOf(err, a.patchStatus(ctx, name, map[string]any{"attachError": refused}))
	}
	return a.patchStatus(ctx, name, map[string]any{"attached": true, "attachmentMetadata": metadata, "attachError": nil})
}

func (a *attacher) attach(ctx context.Context, attachment *storage.VolumeAttachment) (map[string]string, error) {
	volume, err := a.volume(ctx, attachment)
	if err != nil {
		return nil, err
	}
	node, err := a.nodeID(ctx, attachment.Spec.NodeName)
	if err != nil {
		return nil, err
	}
	mode, err := accessmodes.ToCSIAccessMode(volume.Spec.AccessModes, false)
	if err != nil {
		return nil, err
	}
	if err := a.setFinalizers(ctx, attachment, append(slices.Clone(attachment.Finalizers), a.finalizer())); err != nil {
		return nil, err
	}
	source := volume.Spec.CSI
	capability := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode}}
	if mode := volume.Spec.VolumeMode; mode != nil && *mode == core.PersistentVolumeBlock {
		capability.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		mount := &csi.VolumeCapability_MountVolume{FsType: source.FSType, MountFlags: volume.Spec.MountOptions}
		capability.AccessType = &csi.VolumeCapability_Mount{Mount: mount}
	}
	answer, err := a.controller.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
		VolumeId:         source.VolumeHandle,
		NodeId:           node,
		VolumeCapability: capability,
		Readonly:         false,
		VolumeContext:    source.VolumeAttributes,
	})
	return answer.GetPublishContext(), err
}

func (a *attacher) detach(ctx context.Context, attachment *storage.VolumeAttachment) error {
	if !slices.Contains(attachment.Finalizers, a.finalizer()) {
		return nil
	}
	rest := slices.DeleteFunc(slices.Clone(attachment.Finalizers), func(name string) bool { return name == a.finalizer() })
	volume, err := a.volume(ctx, attachment)
	if apierrors.IsNotFound(err) {
		return a.setFinalizers(ctx, attachment, rest)
	}
	if err != nil {
		return err
	}
	// Without the node's entry, from all nodes.
	node, err := a.nodeID(ctx, attachment.Spec.NodeName)
	if err != nil {
		log.Printf("%s: %v", attachment.Name, err)
	}
	request := &csi.ControllerUnpublishVolumeRequest{VolumeId: volume.Spec.CSI.VolumeHandle, NodeId: node}
	if _, err := a.controller.ControllerUnpublishVolume(ctx, request); err != nil {
		refused := &storage.VolumeError{Time: meta.Now(), Message: err.Error()}
		return errorsOf(err, a.patchStatus(ctx, attachment.Name, map[string]any{"detachError": refused}))
	}
	return a.setFinalizers(ctx, attachment, rest)
}

func (a *attacher) volume(ctx context.Context, attachment *storage.VolumeAttachment) (*core.PersistentVolume, error) {
	name := attachment.Spec.Source.PersistentVolumeName
	if name == nil {
		return nil, fmt.Errorf("it names no PersistentVolume")
	}
	volume, err := a.api.CoreV1().PersistentVolumes().Get(ctx, *name, meta.GetOptions{})
	if err == nil && volume.Spec.CSI == nil {
		err = fmt.Errorf("%s is not a CSI volume", *name)
	}
	return volume, err
}

// nodeID is the driver's name for a node, which the node's agent reported.
func (a *attacher) nodeID(ctx context.Context, node string) (string, error) {
	object, err := a.api.StorageV1().CSINodes().Get(ctx, node, meta.GetOptions{})
	if err != nil {
		return "", err
	}
	for _, driver := range object.Spec.Drivers {
		if driver.Name == a.driver {
			return driver.NodeID, nil
		}
	}
	return "", fmt.Errorf("CSINode %s has no driver %s", node, a.driver)
}

func (a *attacher) setFinalizers(ctx context.Context, attachment *storage.VolumeAttachment, finalizers []string) error {
	slices.Sort(finalizers)
	finalizers = slices.Compact(finalizers)
	if slices.Equal(finalizers, attachment.Finalizers) {
		return nil
	}
	patch := map[string]any{"metadata": map[string]any{"finalizers": finalizers}}
	return a.patch(ctx, attachment.Name, patch)
}

func (a *attacher) patchStatus(ctx context.Context, name string, fields map[string]any) error {
	return a.patch(ctx, name, map[string]any{"status": fields}, "status")
}

func (a *attacher) patch(ctx context.Context, name string, patch any, subresources ...string) error {
	body, err := json.Marshal(patch)
	if err != nil {
		return err
	}
	_, err = a.api.StorageV1().VolumeAttachments().
		Patch(ctx, name, types.MergePatchType, body, meta.PatchOptions{}, subresources...)
	return err
}

func errorsOf(first, second error) error {
	if second != nil {
		return fmt.Errorf("%w; and it could not be reported: %v", first, second)
	}
	return first
}
