package main

import (
	"sort"

	"k8s.io/api/core/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/kubernetes/cmd/kubeadm/app/phases/controlplane"
	"k8s.io/kubernetes/cmd/kubeadm/app/phases/etcd"
	kubeadmutil "k8s.io/kubernetes/cmd/kubeadm/app/util"
	configutil "k8s.io/kubernetes/cmd/kubeadm/app/util/config"
	etcdutil "k8s.io/kubernetes/cmd/kubeadm/app/util/etcd"
)

// kubeadmManifests are those of a control plane that `kubeadm init` makes with its defaults.
func kubeadmManifests() []Answer {
	config, err := configutil.DefaultedStaticInitConfiguration()
	check(err)
	config.LocalAPIEndpoint.AdvertiseAddress = "192.0.2.1"
	pods := controlplane.GetStaticPodSpecs(&config.ClusterConfiguration, &config.LocalAPIEndpoint, nil)
	pods["etcd"] = etcd.GetEtcdPodSpec(&config.ClusterConfiguration, &config.LocalAPIEndpoint, "node-1", []etcdutil.Member{})
	var answers []Answer
	for name, pod := range pods {
		manifest, err := kubeadmutil.MarshalToYaml(&pod, v1.SchemeGroupVersion)
		check(err)
		data, err := utilyaml.ToJSON(manifest)
		check(err)
		answers = append(answers, Answer{Name: name, Manifest: data})
	}
	sort.Slice(answers, func(i, j int) bool { return answers[i].Name < answers[j].Name })
	return answers
}
