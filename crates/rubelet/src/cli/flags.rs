//! Every flag, one row each, in the groups `--help` shows.
//!
//! Owns: names, kinds, what each sets, help. Never: parses (`arguments.rs`, `values.rs`).
//! Upstream: `cmd/kubelet/app/options`, `component-base/logs/api/v1`.

use self::{
    Kind::{
        Bool, Duration, Gates, Headers, Int32, Int64, Ip, Labels, Level, List, Map, Pair, Quantity, ReservedMemory,
        Taints, Text, Thresholds, VModule, Version,
    },
    Target::{Field, Help, Nothing, Own, PrintVersion},
};

#[derive(Clone, Copy, Debug)]
pub struct Flag {
    pub name: &'static str,
    pub short: Option<char>,
    pub kind: Kind,
    pub target: Target,
    pub help: &'static str,
    /// Upstream's deprecation text.
    pub deprecated: Option<&'static str>,
}

impl Flag {
    /// Its value is secret: `/flagz` does not show it.
    pub fn is_secret(&self) -> bool {
        matches!(self.name, "manifest-url-header" | "storage-driver-password")
    }
}

/// How the value is parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Text,
    Bool,
    Int32,
    Int64,
    Duration,
    Ip,
    /// `a,b`; repeated flags append.
    List,
    /// `a=b,c=d`; repeated flags add.
    Map,
    /// `a=b`, where the value may have commas; repeated flags add.
    Pair,
    /// `a<b,c<d`; repeated flags add.
    Thresholds,
    /// `a:b,c:d`; repeated flags and names append.
    Headers,
    /// `A=true,B=false`; repeated flags add.
    Gates,
    /// Like `Map`, but the value may be missing.
    Labels,
    /// `key=value:Effect,…`.
    Taints,
    /// `0:memory=1Gi,hugepages-2Mi=1Gi;1:…`; repeated flags append.
    ReservedMemory,
    Quantity,
    Level,
    /// `pattern=N,…`; repeated flags append.
    VModule,
    Version,
}

impl Kind {
    /// The value of the flag given without a value.
    pub fn without_value(self) -> Option<&'static str> {
        matches!(self, Bool | Version).then_some("true")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A field of KubeletConfiguration, as a dotted path.
    Field(&'static str),
    /// A member of `Flags`, named like the flag.
    Own,
    /// No effect. Holds upstream's default.
    Nothing(&'static str),
    Help,
    PrintVersion,
}

#[derive(Debug)]
pub struct Group {
    pub title: &'static str,
    pub flags: &'static [Flag],
}

const MOVED: &str = "This parameter should be set via the config file specified by the Kubelet's --config flag. See https://kubernetes.io/docs/tasks/administer-cluster/kubelet-config-file/ for more information.";
const CADVISOR: &str = "This is a cadvisor flag that was mistakenly registered with the Kubelet. Due to legacy concerns, it will follow the standard CLI deprecation timeline before being removed.";
const EVICTION_INSTEAD: &str = "Use --eviction-hard or --eviction-soft instead. Will be removed in a future version.";

#[rustfmt::skip]
pub const GROUPS: &[Group] = &[
    Group { title: "Start here", flags: &[
        own("config", Text, "file with a KubeletConfiguration; flags win over it"),
        own("config-dir", Text, "directory of .conf drop-ins, merged over the file in the order of their names"),
        field("feature-gates", Gates, "featureGates", "switch features: Name=true,Other=false"),
        own("root-dir", Text, "where the pods' files live [/var/lib/kubelet]"),
        Flag { name: "help", short: Some('h'), kind: Bool, target: Help, help: "this text", deprecated: None },
        Flag { name: "version", short: None, kind: Version, target: PrintVersion, help: "print the version; =raw for all of it", deprecated: None },
    ] },
    Group { title: "Where pods come from", flags: &[
        field("pod-manifest-path", Text, "staticPodPath", "file or directory of pod manifests"),
        field("file-check-frequency", Duration, "fileCheckFrequency", "how often manifests are read again, should a change go unnoticed"),
        field("manifest-url", Text, "staticPodURL", "URL of pod manifests"),
        field("manifest-url-header", Headers, "staticPodURLHeader", "headers for that URL, name:value,…"),
        field("http-check-frequency", Duration, "httpCheckFrequency", "how often that URL is read"),
        field("sync-frequency", Duration, "syncFrequency", "longest time between syncs of a pod"),
    ] },
    Group { title: "The cluster", flags: &[
        own("kubeconfig", Text, "how to reach the API server; without it the node stands alone"),
        own("bootstrap-kubeconfig", Text, "how to ask for a first client certificate"),
        own("cert-dir", Text, "where certificates are kept [/var/lib/kubelet/pki]"),
        field("rotate-certificates", Bool, "rotateCertificates", "renew the client certificate"),
        field("rotate-server-certificates", Bool, "serverTLSBootstrap", "ask the API server for the serving certificate"),
        field("kube-api-qps", Int32, "kubeAPIQPS", "requests per second to the API server"),
        field("kube-api-burst", Int32, "kubeAPIBurst", "requests at once to the API server"),
        field("kube-api-content-type", Text, "contentType", "content type of requests to the API server"),
        field("event-qps", Int32, "eventRecordQPS", "events per second"),
        field("event-burst", Int32, "eventBurst", "events at once"),
    ] },
    Group { title: "The node", flags: &[
        own("hostname-override", Text, "the node's name, instead of the host's"),
        own("node-ip", Text, "the node's address, or two for two families"),
        own("node-labels", Labels, "labels to register with, key=value,…"),
        own("cloud-provider", Text, "empty, or external"),
        kept("provider-id", Text, "providerID", "the node's name in the cloud provider's database"),
        field("register-node", Bool, "registerNode", "register with the API server"),
        field("register-with-taints", Taints, "registerWithTaints", "taints to register with, key=value:effect,…"),
        field("node-status-update-frequency", Duration, "nodeStatusUpdateFrequency", "how often the node's status is computed"),
        field("node-status-max-images", Int32, "nodeStatusMaxImages", "images listed in the node's status; -1 for all"),
        field("pod-cidr", Text, "podCIDR", "addresses for pods, on a node that stands alone"),
        field("max-pods", Int32, "maxPods", "pods on this node, at most"),
        field("pods-per-core", Int32, "podsPerCore", "pods per core, at most; 0 for no such limit"),
    ] },
    Group { title: "Runtime and images", flags: &[
        field("container-runtime-endpoint", Text, "containerRuntimeEndpoint", "the runtime's socket"),
        field("image-service-endpoint", Text, "imageServiceEndpoint", "the image service's socket, if it is another"),
        field("runtime-request-timeout", Duration, "runtimeRequestTimeout", "deadline of an ordinary call to the runtime"),
        field("serialize-image-pulls", Bool, "serializeImagePulls", "one pull at a time"),
        field("registry-qps", Int32, "registryPullQPS", "pulls per second; 0 for no limit"),
        field("registry-burst", Int32, "registryBurst", "pulls at once"),
        field("minimum-image-ttl-duration", Duration, "imageMinimumGCAge", "unused images are kept this long"),
        field("image-gc-high-threshold", Int32, "imageGCHighThresholdPercent", "disk usage that starts image collection, in percent"),
        field("image-gc-low-threshold", Int32, "imageGCLowThresholdPercent", "disk usage that image collection aims for, in percent"),
        own("image-credential-provider-config", Text, "configuration of credential provider plugins"),
        own("image-credential-provider-bin-dir", Text, "where those plugins are"),
    ] },
    Group { title: "Containers", flags: &[
        field("cluster-dns", List, "clusterDNS", "DNS servers for pods"),
        field("cluster-domain", Text, "clusterDomain", "DNS domain for pods"),
        field("resolv-conf", Text, "resolvConf", "the resolver file pods' DNS is made from"),
        field("hairpin-mode", Text, "hairpinMode", "promiscuous-bridge, hairpin-veth or none"),
        field("make-iptables-util-chains", Bool, "makeIPTablesUtilChains", "keep the iptables hint chain for others"),
        field("allowed-unsafe-sysctls", List, "allowedUnsafeSysctls", "unsafe sysctls pods may set"),
        own("seccomp-default", Bool, "RuntimeDefault seccomp for containers that name no profile"),
        field("pod-max-pids", Int64, "podPidsLimit", "processes per pod; -1 for no limit"),
        field("container-log-max-size", Text, "containerLogMaxSize", "a container's log is rotated at this size"),
        field("container-log-max-files", Int32, "containerLogMaxFiles", "log files kept per container"),
        gone("minimum-container-ttl-duration", Duration, EVICTION_INSTEAD, "dead containers are kept this long"),
        gone("maximum-dead-containers-per-container", Int32, EVICTION_INSTEAD, "dead instances kept per container"),
        gone("maximum-dead-containers", Int32, EVICTION_INSTEAD, "dead containers kept; negative for no limit"),
    ] },
    Group { title: "Volumes", flags: &[
        field("volume-plugin-dir", Text, "volumePluginDir", "where FlexVolume plugins are"),
        field("volume-stats-agg-period", Duration, "volumeStatsAggPeriod", "how often volumes are measured; negative for never"),
        field("enable-controller-attach-detach", Bool, "enableControllerAttachDetach", "leave attaching to the controller"),
        field("local-storage-capacity-isolation", Bool, "localStorageCapacityIsolation", "account for local ephemeral storage"),
        gone("experimental-mounter-path", Text, "will be removed in 1.25 or later. in favor of using CSI.", "another mount program"),
    ] },
    Group { title: "CPU, memory and cgroups", flags: &[
        field("cgroup-driver", Text, "cgroupDriver", "cgroupfs or systemd, should the runtime not say"),
        field("cgroup-root", Text, "cgroupRoot", "the cgroup of all pods"),
        field("cgroups-per-qos", Bool, "cgroupsPerQOS", "a cgroup per QoS class and pod"),
        field("kubelet-cgroups", Text, "kubeletCgroups", "the agent's own cgroup"),
        field("system-cgroups", Text, "systemCgroups", "the cgroup of processes that have none"),
        own("runtime-cgroups", Text, "the runtime's cgroup"),
        field("enforce-node-allocatable", List, "enforceNodeAllocatable", "none, pods, system-reserved, kube-reserved, …"),
        field("system-reserved", Map, "systemReserved", "kept for the system, cpu=200m,memory=500Mi,…"),
        field("system-reserved-cgroup", Text, "systemReservedCgroup", "the cgroup that is enforced on"),
        field("kube-reserved", Map, "kubeReserved", "kept for Kubernetes' own processes"),
        field("kube-reserved-cgroup", Text, "kubeReservedCgroup", "the cgroup that is enforced on"),
        field("reserved-cpus", Text, "reservedSystemCPUs", "CPUs kept for the system, 0-1,4"),
        field("reserved-memory", ReservedMemory, "reservedMemory", "memory kept per NUMA node, 0:memory=1Gi;1:…"),
        field("cpu-cfs-quota", Bool, "cpuCFSQuota", "enforce CPU limits"),
        field("cpu-cfs-quota-period", Duration, "cpuCFSQuotaPeriod", "the period CPU limits are counted over"),
        field("cpu-manager-policy", Text, "cpuManagerPolicy", "none or static"),
        field("cpu-manager-policy-options", Pair, "cpuManagerPolicyOptions", "fine tuning, name=value"),
        field("cpu-manager-reconcile-period", Duration, "cpuManagerReconcilePeriod", "how often CPU sets are put right"),
        field("memory-manager-policy", Text, "memoryManagerPolicy", "None or Static"),
        field("topology-manager-policy", Text, "topologyManagerPolicy", "none, best-effort, restricted or single-numa-node"),
        field("topology-manager-policy-options", Map, "topologyManagerPolicyOptions", "fine tuning, name=value,…"),
        field("topology-manager-scope", Text, "topologyManagerScope", "container or pod"),
        field("qos-reserved", Map, "qosReserved", "requests kept per QoS class, memory=50%"),
    ] },
    Group { title: "Eviction", flags: &[
        field("eviction-hard", Thresholds, "evictionHard", "evict at once below, memory.available<1Gi,…"),
        field("eviction-soft", Thresholds, "evictionSoft", "evict after a grace period below"),
        field("eviction-soft-grace-period", Map, "evictionSoftGracePeriod", "those grace periods, memory.available=1m30s,…"),
        field("eviction-max-pod-grace-period", Int32, "evictionMaxPodGracePeriod", "seconds a softly evicted pod gets, at most"),
        field("eviction-minimum-reclaim", Map, "evictionMinimumReclaim", "reclaim at least, imagefs.available=2Gi,…"),
        field("eviction-pressure-transition-period", Duration, "evictionPressureTransitionPeriod", "pressure is over after this long without"),
        field("kernel-memcg-notification", Bool, "kernelMemcgNotification", "let the kernel tell of memory thresholds"),
        gone("experimental-allocatable-ignore-eviction", Bool, "will be removed in 1.25 or later.", "leave thresholds out of allocatable"),
    ] },
    Group { title: "Serving", flags: &[
        field("enable-server", Bool, "enableServer", "serve at all"),
        field("address", Ip, "address", "address to serve on"),
        field("port", Int32, "port", "port of the API with authentication"),
        field("read-only-port", Int32, "readOnlyPort", "port without authentication; 0 for none"),
        field("healthz-bind-address", Ip, "healthzBindAddress", "address of the health check"),
        field("healthz-port", Int32, "healthzPort", "port of the health check; 0 for none"),
        field("anonymous-auth", Bool, "authentication.anonymous.enabled", "let requests without identity in"),
        field("client-ca-file", Text, "authentication.x509.clientCAFile", "accept client certificates of these authorities"),
        field("authentication-token-webhook", Bool, "authentication.webhook.enabled", "ask the API server who a token is"),
        field("authentication-token-webhook-cache-ttl", Duration, "authentication.webhook.cacheTTL", "how long that answer holds"),
        field("authorization-mode", Text, "authorization.mode", "AlwaysAllow or Webhook"),
        field("authorization-webhook-cache-authorized-ttl", Duration, "authorization.webhook.cacheAuthorizedTTL", "how long a yes holds"),
        field("authorization-webhook-cache-unauthorized-ttl", Duration, "authorization.webhook.cacheUnauthorizedTTL", "how long a no holds"),
        field("tls-cert-file", Text, "tlsCertFile", "serving certificate"),
        field("tls-private-key-file", Text, "tlsPrivateKeyFile", "its key"),
        field("tls-cipher-suites", List, "tlsCipherSuites", "cipher suites offered"),
        field("tls-min-version", Text, "tlsMinVersion", "VersionTLS12 or VersionTLS13, …"),
        field("enable-debugging-handlers", Bool, "enableDebuggingHandlers", "logs, exec, attach, port-forward, …"),
        field("contention-profiling", Bool, "enableContentionProfiling", "profile waiting for locks"),
        field("streaming-connection-idle-timeout", Duration, "streamingConnectionIdleTimeout", "idle streams are closed after this time"),
    ] },
    Group { title: "Logging", flags: &[
        Flag { name: "v", short: Some('v'), kind: Level, target: Field("logging.verbosity"), help: "log verbosity, 0 to 10", deprecated: None },
        kept("vmodule", VModule, "logging.vmodule", "log verbosity per file, pattern=N,…"),
        field("logging-format", Text, "logging.format", "text or json"),
        kept("log-flush-frequency", Duration, "logging.flushFrequency", "how often logs are flushed"),
        field("log-text-split-stream", Bool, "logging.options.text.splitStream", "text: errors to stderr, the rest to stdout"),
        field("log-text-info-buffer-size", Quantity, "logging.options.text.infoBufferSize", "text: buffer of that stdout"),
        field("log-json-split-stream", Bool, "logging.options.json.splitStream", "json: errors to stderr, the rest to stdout"),
        field("log-json-info-buffer-size", Quantity, "logging.options.json.infoBufferSize", "json: buffer of that stdout"),
    ] },
    Group { title: "The process and its host", flags: &[
        own("lock-file", Text, "hold a lock on this file"),
        own("exit-on-lock-contention", Bool, "exit when another wants that lock"),
        field("oom-score-adj", Int32, "oomScoreAdj", "OOM score adjustment of the agent"),
        field("max-open-files", Int64, "maxOpenFiles", "files the agent may open"),
        field("fail-swap-on", Bool, "failSwapOn", "refuse to start with swap"),
        kept("fail-cgroupv1", Bool, "failCgroupV1", "refuse to start on cgroup v1"),
        field("protect-kernel-defaults", Bool, "protectKernelDefaults", "refuse to start with other kernel tunables, instead of setting them"),
        field("runonce", Bool, "runOnce", "no longer supported"),
        Flag { name: "housekeeping-interval", short: None, kind: Duration, target: Nothing("1s"), help: "accepted, without effect", deprecated: None },
    ] },
    Group { title: "Accepted for old command lines, without effect", flags: &[
        cadvisor("application-metrics-count-limit", Int64, "100"),
        cadvisor("boot-id-file", Text, "/proc/sys/kernel/random/boot_id"),
        cadvisor("container-hints", Text, "/etc/cadvisor/container_hints.json"),
        cadvisor("containerd", Text, "/run/containerd/containerd.sock"),
        cadvisor("containerd-namespace", Text, "k8s.io"),
        cadvisor("enable-load-reader", Bool, "false"),
        cadvisor("event-storage-age-limit", Text, "default=24h"),
        cadvisor("event-storage-event-limit", Text, "default=100000"),
        cadvisor("global-housekeeping-interval", Duration, "1m0s"),
        cadvisor("log-cadvisor-usage", Bool, "false"),
        cadvisor("machine-id-file", Text, "/etc/machine-id,/var/lib/dbus/machine-id"),
        cadvisor("storage-driver-buffer-duration", Duration, "1m0s"),
        cadvisor("storage-driver-db", Text, "cadvisor"),
        cadvisor("storage-driver-host", Text, "localhost:8086"),
        cadvisor("storage-driver-password", Text, "root"),
        cadvisor("storage-driver-secure", Bool, "false"),
        cadvisor("storage-driver-table", Text, "stats"),
        cadvisor("storage-driver-user", Text, "root"),
    ] },
];

pub fn by_name(name: &str) -> Option<&'static Flag> {
    all().find(|flag| flag.name == name)
}

pub fn by_short(short: char) -> Option<&'static Flag> {
    all().find(|flag| flag.short == Some(short))
}

pub fn all() -> impl Iterator<Item = &'static Flag> {
    GROUPS.iter().flat_map(|group| group.flags)
}

const fn own(name: &'static str, kind: Kind, help: &'static str) -> Flag {
    Flag { name, short: None, kind, target: Own, help, deprecated: None }
}

const fn gone(name: &'static str, kind: Kind, deprecated: &'static str, help: &'static str) -> Flag {
    Flag { name, short: None, kind, target: Own, help, deprecated: Some(deprecated) }
}

const fn field(name: &'static str, kind: Kind, path: &'static str, help: &'static str) -> Flag {
    Flag { name, short: None, kind, target: Field(path), help, deprecated: Some(MOVED) }
}

/// A field whose flag is not deprecated.
const fn kept(name: &'static str, kind: Kind, path: &'static str, help: &'static str) -> Flag {
    Flag { name, short: None, kind, target: Field(path), help, deprecated: None }
}

const fn cadvisor(name: &'static str, kind: Kind, default: &'static str) -> Flag {
    Flag { name, short: None, kind, target: Nothing(default), help: "", deprecated: Some(CADVISOR) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rubelet_core::config::{KubeletConfiguration, at};

    use super::*;

    /// Upstream's flags, from its own flag set: name, Go type, whether deprecated, its destination.
    const UPSTREAM: &str = include_str!("../../testdata/flags.txt");

    fn go_type(kind: Kind) -> &'static str {
        match kind {
            Text => "string",
            Bool => "bool",
            Int32 => "int32",
            Int64 => "int64",
            Duration => "duration",
            Ip => "ip",
            List => "stringSlice",
            Map | Pair | Thresholds | Labels => "mapStringString",
            Headers => "colonSeparatedMultimapStringString",
            Gates => "mapStringBool",
            Taints => "[]v1.Taint",
            ReservedMemory => "reserved-memory",
            Quantity => "quantity",
            Level => "Level",
            VModule => "pattern=N,...",
            Version => "version",
        }
    }

    #[test]
    fn the_flags_are_upstreams_all_of_them_and_no_others() {
        let ours: BTreeMap<&str, String> = all()
            .filter(|flag| flag.target != Help)
            .map(|flag| {
                let deprecated = if flag.deprecated.is_some() { "deprecated" } else { "kept" };
                let group = match flag.target {
                    Field(_) => "config",
                    Own => "flag",
                    Nothing(_) | PrintVersion | Help => "global",
                };
                (flag.name, format!("{} {deprecated} {group}", go_type(flag.kind)))
            })
            .collect();
        let theirs: BTreeMap<&str, String> = UPSTREAM
            .lines()
            .filter_map(|line| line.split_once(' '))
            // Only one of its flags is a plain int, and it has no effect.
            .map(|(name, rest)| (name, rest.replacen("int ", "int64 ", usize::from(rest.starts_with("int ")))))
            .collect();
        assert_eq!(ours, theirs);
        assert_eq!(all().count(), 149);
    }

    #[test]
    fn every_flag_of_a_field_names_a_field_that_exists() {
        let fields = serde_json::to_value(KubeletConfiguration::default()).unwrap();
        for flag in all() {
            if let Field(path) = flag.target {
                assert!(at(&fields, path).is_some(), "{}", flag.name);
            }
        }
    }
}
