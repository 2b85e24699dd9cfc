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
    Group { title: "General", flags: &[
        own("config", Text, "KubeletConfiguration file; flags override it"),
        own("config-dir", Text, "directory of .conf drop-ins, merged over the file in name order"),
        field("feature-gates", Gates, "featureGates", "enable or disable features, Name=true,Other=false"),
        own("root-dir", Text, "directory of pod files and state [/var/lib/kubelet]"),
        Flag { name: "help", short: Some('h'), kind: Bool, target: Help, help: "print this help", deprecated: None },
        Flag { name: "version", short: None, kind: Version, target: PrintVersion, help: "print the version; =raw for all details", deprecated: None },
    ] },
    Group { title: "Pod sources", flags: &[
        field("pod-manifest-path", Text, "staticPodPath", "file or directory of pod manifests"),
        field("file-check-frequency", Duration, "fileCheckFrequency", "period of a full read of the manifests, besides change notification"),
        field("manifest-url", Text, "staticPodURL", "URL of pod manifests"),
        field("manifest-url-header", Headers, "staticPodURLHeader", "headers for that URL, name:value,…"),
        field("http-check-frequency", Duration, "httpCheckFrequency", "period of reading that URL"),
        field("sync-frequency", Duration, "syncFrequency", "longest time between syncs of a pod"),
    ] },
    Group { title: "The cluster", flags: &[
        own("kubeconfig", Text, "kubeconfig file for the API server; without it the node is standalone"),
        own("bootstrap-kubeconfig", Text, "kubeconfig file for requesting the first client certificate"),
        own("cert-dir", Text, "directory of certificates [/var/lib/kubelet/pki]"),
        field("rotate-certificates", Bool, "rotateCertificates", "renew the client certificate"),
        field("rotate-server-certificates", Bool, "serverTLSBootstrap", "request the serving certificate from the API server"),
        field("kube-api-qps", Int32, "kubeAPIQPS", "requests per second to the API server"),
        field("kube-api-burst", Int32, "kubeAPIBurst", "burst of requests to the API server"),
        field("kube-api-content-type", Text, "contentType", "content type of requests to the API server"),
        field("event-qps", Int32, "eventRecordQPS", "events per second"),
        field("event-burst", Int32, "eventBurst", "burst of events"),
    ] },
    Group { title: "The node", flags: &[
        own("hostname-override", Text, "node name; default is the host name"),
        own("node-ip", Text, "node address, or two for dual stack"),
        own("node-labels", Labels, "labels to register with, key=value,…"),
        own("cloud-provider", Text, "empty, or external"),
        kept("provider-id", Text, "providerID", "ID of the node at the cloud provider"),
        field("register-node", Bool, "registerNode", "register with the API server"),
        field("register-with-taints", Taints, "registerWithTaints", "taints to register with, key=value:effect,…"),
        field("node-status-update-frequency", Duration, "nodeStatusUpdateFrequency", "period of computing the node status"),
        field("node-status-max-images", Int32, "nodeStatusMaxImages", "images listed in the node's status; -1 for all"),
        field("pod-cidr", Text, "podCIDR", "CIDR of pod addresses on a standalone node"),
        field("max-pods", Int32, "maxPods", "maximum number of pods on this node"),
        field("pods-per-core", Int32, "podsPerCore", "maximum number of pods per core; 0 for no limit"),
    ] },
    Group { title: "Runtime and images", flags: &[
        field("container-runtime-endpoint", Text, "containerRuntimeEndpoint", "the runtime's socket"),
        field("image-service-endpoint", Text, "imageServiceEndpoint", "the image service's socket, if different"),
        field("runtime-request-timeout", Duration, "runtimeRequestTimeout", "deadline of an ordinary call to the runtime"),
        field("serialize-image-pulls", Bool, "serializeImagePulls", "one pull at a time"),
        field("registry-qps", Int32, "registryPullQPS", "pulls per second; 0 for no limit"),
        field("registry-burst", Int32, "registryBurst", "burst of pulls"),
        field("minimum-image-ttl-duration", Duration, "imageMinimumGCAge", "minimum age of an unused image before collection"),
        field("image-gc-high-threshold", Int32, "imageGCHighThresholdPercent", "disk usage that starts image collection, in percent"),
        field("image-gc-low-threshold", Int32, "imageGCLowThresholdPercent", "disk usage at which image collection stops, in percent"),
        own("image-credential-provider-config", Text, "configuration of credential provider plugins"),
        own("image-credential-provider-bin-dir", Text, "directory of those plugins"),
    ] },
    Group { title: "Containers", flags: &[
        field("cluster-dns", List, "clusterDNS", "DNS servers for pods"),
        field("cluster-domain", Text, "clusterDomain", "DNS domain for pods"),
        field("resolv-conf", Text, "resolvConf", "resolver configuration file that pods inherit"),
        field("hairpin-mode", Text, "hairpinMode", "promiscuous-bridge, hairpin-veth or none"),
        field("make-iptables-util-chains", Bool, "makeIPTablesUtilChains", "maintain the KUBE-IPTABLES-HINT chain"),
        field("allowed-unsafe-sysctls", List, "allowedUnsafeSysctls", "unsafe sysctls pods may set"),
        own("seccomp-default", Bool, "RuntimeDefault seccomp for containers that name no profile"),
        field("pod-max-pids", Int64, "podPidsLimit", "processes per pod; -1 for no limit"),
        field("container-log-max-size", Text, "containerLogMaxSize", "size at which a container's log is rotated"),
        field("container-log-max-files", Int32, "containerLogMaxFiles", "log files kept per container"),
        gone("minimum-container-ttl-duration", Duration, EVICTION_INSTEAD, "minimum age of a dead container before removal"),
        gone("maximum-dead-containers-per-container", Int32, EVICTION_INSTEAD, "dead instances kept per container"),
        gone("maximum-dead-containers", Int32, EVICTION_INSTEAD, "dead containers kept; negative for no limit"),
    ] },
    Group { title: "Volumes", flags: &[
        field("volume-plugin-dir", Text, "volumePluginDir", "directory of FlexVolume plugins"),
        field("volume-stats-agg-period", Duration, "volumeStatsAggPeriod", "period of measuring volumes; negative disables it"),
        field("enable-controller-attach-detach", Bool, "enableControllerAttachDetach", "attach/detach controller attaches volumes, not the agent"),
        field("local-storage-capacity-isolation", Bool, "localStorageCapacityIsolation", "account for local ephemeral storage"),
        gone("experimental-mounter-path", Text, "will be removed in 1.25 or later. in favor of using CSI.", "path of the mounter binary"),
    ] },
    Group { title: "CPU, memory and cgroups", flags: &[
        field("cgroup-driver", Text, "cgroupDriver", "cgroupfs or systemd, if the runtime does not report it"),
        field("cgroup-root", Text, "cgroupRoot", "the cgroup of all pods"),
        field("cgroups-per-qos", Bool, "cgroupsPerQOS", "a cgroup per QoS class and pod"),
        field("kubelet-cgroups", Text, "kubeletCgroups", "the agent's own cgroup"),
        field("system-cgroups", Text, "systemCgroups", "cgroup for processes that are in the root cgroup"),
        own("runtime-cgroups", Text, "the runtime's cgroup"),
        field("enforce-node-allocatable", List, "enforceNodeAllocatable", "none, pods, system-reserved, kube-reserved, …"),
        field("system-reserved", Map, "systemReserved", "reserved for the system, cpu=200m,memory=500Mi,…"),
        field("system-reserved-cgroup", Text, "systemReservedCgroup", "cgroup on which systemReserved is enforced"),
        field("kube-reserved", Map, "kubeReserved", "reserved for Kubernetes components"),
        field("kube-reserved-cgroup", Text, "kubeReservedCgroup", "cgroup on which kubeReserved is enforced"),
        field("reserved-cpus", Text, "reservedSystemCPUs", "CPUs reserved for the system, 0-1,4"),
        field("reserved-memory", ReservedMemory, "reservedMemory", "memory reserved per NUMA node, 0:memory=1Gi;1:…"),
        field("cpu-cfs-quota", Bool, "cpuCFSQuota", "enforce CPU limits"),
        field("cpu-cfs-quota-period", Duration, "cpuCFSQuotaPeriod", "CFS quota period of CPU limits"),
        field("cpu-manager-policy", Text, "cpuManagerPolicy", "none or static"),
        field("cpu-manager-policy-options", Pair, "cpuManagerPolicyOptions", "policy options, name=value"),
        field("cpu-manager-reconcile-period", Duration, "cpuManagerReconcilePeriod", "period of reconciling CPU sets"),
        field("memory-manager-policy", Text, "memoryManagerPolicy", "None or Static"),
        field("topology-manager-policy", Text, "topologyManagerPolicy", "none, best-effort, restricted or single-numa-node"),
        field("topology-manager-policy-options", Map, "topologyManagerPolicyOptions", "policy options, name=value,…"),
        field("topology-manager-scope", Text, "topologyManagerScope", "container or pod"),
        field("qos-reserved", Map, "qosReserved", "requests reserved per QoS class, memory=50%"),
    ] },
    Group { title: "Eviction", flags: &[
        field("eviction-hard", Thresholds, "evictionHard", "hard eviction thresholds, memory.available<1Gi,…"),
        field("eviction-soft", Thresholds, "evictionSoft", "soft eviction thresholds"),
        field("eviction-soft-grace-period", Map, "evictionSoftGracePeriod", "grace periods of soft thresholds, memory.available=1m30s,…"),
        field("eviction-max-pod-grace-period", Int32, "evictionMaxPodGracePeriod", "maximum pod grace period of a soft eviction, in seconds"),
        field("eviction-minimum-reclaim", Map, "evictionMinimumReclaim", "minimum amount to reclaim, imagefs.available=2Gi,…"),
        field("eviction-pressure-transition-period", Duration, "evictionPressureTransitionPeriod", "time before a pressure condition is cleared"),
        field("kernel-memcg-notification", Bool, "kernelMemcgNotification", "use kernel notifications of memory thresholds"),
        gone("experimental-allocatable-ignore-eviction", Bool, "will be removed in 1.25 or later.", "ignore eviction thresholds in allocatable"),
    ] },
    Group { title: "Serving", flags: &[
        field("enable-server", Bool, "enableServer", "enable the server"),
        field("address", Ip, "address", "address to serve on"),
        field("port", Int32, "port", "port of the API with authentication"),
        field("read-only-port", Int32, "readOnlyPort", "port without authentication; 0 for none"),
        field("healthz-bind-address", Ip, "healthzBindAddress", "address of the health check"),
        field("healthz-port", Int32, "healthzPort", "port of the health check; 0 for none"),
        field("anonymous-auth", Bool, "authentication.anonymous.enabled", "allow anonymous requests"),
        field("client-ca-file", Text, "authentication.x509.clientCAFile", "CA file for client certificates"),
        field("authentication-token-webhook", Bool, "authentication.webhook.enabled", "authenticate tokens with TokenReview"),
        field("authentication-token-webhook-cache-ttl", Duration, "authentication.webhook.cacheTTL", "cache time of token reviews"),
        field("authorization-mode", Text, "authorization.mode", "AlwaysAllow or Webhook"),
        field("authorization-webhook-cache-authorized-ttl", Duration, "authorization.webhook.cacheAuthorizedTTL", "cache time of allowed requests"),
        field("authorization-webhook-cache-unauthorized-ttl", Duration, "authorization.webhook.cacheUnauthorizedTTL", "cache time of denied requests"),
        field("tls-cert-file", Text, "tlsCertFile", "serving certificate"),
        field("tls-private-key-file", Text, "tlsPrivateKeyFile", "key of the serving certificate"),
        field("tls-cipher-suites", List, "tlsCipherSuites", "cipher suites offered"),
        field("tls-min-version", Text, "tlsMinVersion", "VersionTLS12 or VersionTLS13, …"),
        field("enable-debugging-handlers", Bool, "enableDebuggingHandlers", "logs, exec, attach, port-forward, …"),
        field("contention-profiling", Bool, "enableContentionProfiling", "lock contention profiling"),
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
        own("exit-on-lock-contention", Bool, "exit when another process requests that lock"),
        field("oom-score-adj", Int32, "oomScoreAdj", "OOM score adjustment of the agent"),
        field("max-open-files", Int64, "maxOpenFiles", "maximum number of open files of the agent"),
        field("fail-swap-on", Bool, "failSwapOn", "refuse to start with swap"),
        kept("fail-cgroupv1", Bool, "failCgroupV1", "refuse to start on cgroup v1"),
        field("protect-kernel-defaults", Bool, "protectKernelDefaults", "fail if kernel tunables differ, instead of setting them"),
        field("runonce", Bool, "runOnce", "no longer supported"),
        Flag { name: "housekeeping-interval", short: None, kind: Duration, target: Nothing("1s"), help: "accepted, without effect", deprecated: None },
    ] },
    Group { title: "Rubelet's own; upstream does not know them", flags: &[
        own("rubelet-exec-needs-create", Bool, "exec, attach, portForward and run need the verb create, also as a WebSocket, which is a GET"),
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
    fn the_flags_are_upstreams_all_of_them_and_our_own_by_prefix() {
        let ours: BTreeMap<&str, String> = all()
            .filter(|flag| flag.target != Help && !flag.name.starts_with("rubelet-"))
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
        assert_eq!(all().count(), 150);
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
