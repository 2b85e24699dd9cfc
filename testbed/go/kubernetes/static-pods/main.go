// static-pods prints what Rubelet needs to give static pods the UIDs that upstream gives them:
// `types` the internal types of a pod as spew names them, `answers` manifests with upstream's UIDs,
// `dump` the text that upstream hashes for the manifest on standard input.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"
	_ "unsafe"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	api "k8s.io/kubernetes/pkg/apis/core"
	_ "k8s.io/kubernetes/pkg/kubelet/config"
	"k8s.io/utils/dump"
)

//go:linkname applyDefaults k8s.io/kubernetes/pkg/kubelet/config.applyDefaults
func applyDefaults(logger klog.Logger, pod *api.Pod, source string, isFile bool, nodeName types.NodeName) error

// Answer is a manifest, where it was read, and the UID that upstream gives it.
type Answer struct {
	Name     string          `json:"name"`
	File     string          `json:"file,omitempty"`
	URL      string          `json:"url,omitempty"`
	Node     string          `json:"node"`
	UID      string          `json:"uid"`
	Manifest json.RawMessage `json:"manifest"`
}

func main() {
	if len(os.Args) != 2 {
		fail("usage: static-pods types|answers|dump")
	}
	// A time that was decoded refers to the local zone, and the dump shows it. The answers are those of a node on UTC.
	if zone, _ := time.Now().Zone(); zone != "UTC" || time.Local.String() != "Local" {
		fail("/etc/localtime is to be UTC")
	}
	switch os.Args[1] {
	case "types":
		printTypes(os.Stdout)
	case "answers":
		printAnswers(os.Stdout)
	case "dump":
		manifest, err := io.ReadAll(os.Stdin)
		check(err)
		fmt.Println(dump.ForHash(decode(manifest)))
	default:
		fail("usage: static-pods types|answers|dump")
	}
}

func printAnswers(out io.Writer) {
	encoder := json.NewEncoder(out)
	encoder.SetEscapeHTML(false)
	cases := kubeadmManifests()
	cases = append(cases, generatedManifests()...)
	for number, answer := range cases {
		answer.Node = []string{"node-1", "Node.Example"}[number%2]
		source := "/etc/kubernetes/manifests/" + answer.Name + ".yaml"
		if number%10 == 9 {
			source = "http://manifests.example/" + answer.Name
			answer.URL = source
		} else {
			answer.File = source
		}
		pod := decode(answer.Manifest)
		check(applyDefaults(klog.Background(), pod, source, answer.URL == "", types.NodeName(answer.Node)))
		answer.UID = string(pod.UID)
		check(encoder.Encode(answer))
	}
}

func decode(manifest []byte) *api.Pod {
	data, err := utilyaml.ToJSON(manifest)
	check(err)
	object, err := runtime.Decode(legacyscheme.Codecs.UniversalDecoder(), data)
	if err != nil {
		fail(fmt.Sprintf("%v in %s", err, manifest))
	}
	return object.(*api.Pod)
}

func check(err error) {
	if err != nil {
		fail(err.Error())
	}
}

func fail(message string) {
	fmt.Fprintln(os.Stderr, "static-pods:", message)
	os.Exit(1)
}
