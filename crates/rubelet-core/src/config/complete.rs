//! A complete configuration from files, drop-ins and flags, each over the one before.
//!
//! Owns: order, defaults that depend on other fields, and the origin of each field. Never: reads a file; the shell passes
//! documents.
//! Upstream: `cmd/kubelet/app/server.go` (NewKubeletCommand, loadConfigFile, mergeKubeletConfigurations, kubeletConfigFlagPrecedence), `applyLegacyDefaults`.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Component, Path, PathBuf},
};

use serde_json::Value;

use super::{
    document::{self, Mismatch},
    duration::GoDuration,
    gates::{self, Gate, Gates},
    types::{KubeletConfiguration, Section},
    validate::{self, Host},
};

pub const API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";
pub const KIND: &str = "KubeletConfiguration";

/// The origin of a field's value. None: it has its default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    File(PathBuf),
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::File(path) => write!(f, "{}", path.display()),
            Origin::Flag(name) => write!(f, "flag --{name}"),
        }
    }
}

/// An error that prevents the start.
#[derive(Clone, Debug, PartialEq)]
pub struct ConfigProblem {
    pub origin: Option<Origin>,
    /// A dotted path; empty when it is about the whole document.
    pub field: String,
    pub value: Option<Value>,
    /// What is allowed; upstream's text where it has one.
    pub message: String,
}

impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(origin) = &self.origin {
            write!(f, "{origin}: ")?;
        }
        match &self.value {
            Some(value) => write!(f, "{} = {value}: {}", self.field, self.message),
            None if self.field.is_empty() => f.write_str(&self.message),
            None => write!(f, "{}: {}", self.field, self.message),
        }
    }
}

/// A configuration under construction.
#[derive(Clone, Debug)]
pub struct Draft {
    pub config: KubeletConfiguration,
    origins: BTreeMap<String, Origin>,
    pub warnings: Vec<String>,
}

/// A flag's value, ready to be put at its field.
#[derive(Clone, Debug, PartialEq)]
pub struct FlagValue {
    pub flag: String,
    pub field: &'static str,
    pub value: Value,
}

impl Draft {
    /// Upstream's legacy defaults, which apply without a configuration file.
    pub fn without_file() -> Draft {
        let mut config = KubeletConfiguration::default();
        fill_gated(&mut config, &Gates::default());
        config.authentication.anonymous.enabled = true;
        config.authentication.webhook.enabled = false;
        config.authorization.mode = "AlwaysAllow".to_owned();
        config.read_only_port = 10255;
        Draft { config, origins: BTreeMap::new(), warnings: Vec::new() }
    }

    /// Without a configuration file and without an API server. Upstream's legacy defaults would let everybody on the network
    /// run commands in pods: here the server is on loopback and needs a client certificate, and there is no read-only port.
    pub fn standalone() -> Draft {
        let mut draft = Draft::without_file();
        draft.config.address = "127.0.0.1".to_owned();
        draft.config.authentication.anonymous.enabled = false;
        draft.config.read_only_port = 0;
        draft
    }

    /// The result of a file without any field.
    pub fn empty_file() -> Draft {
        let document = serde_json::json!({"apiVersion": API_VERSION, "kind": KIND});
        Draft::from_file(Path::new("/"), &document, &BTreeMap::new()).expect("there is nothing in it to refuse")
    }

    /// `flag_gates` apply while the file gets its defaults, as upstream.
    pub fn from_file(
        path: &Path,
        document: &Value,
        flag_gates: &BTreeMap<String, bool>,
    ) -> Result<Draft, Vec<ConfigProblem>> {
        let origin = Origin::File(path.to_owned());
        let fields = fields_of(document, &origin)?;
        let mut draft =
            Draft { config: KubeletConfiguration::default(), origins: BTreeMap::new(), warnings: Vec::new() };
        draft.note(&serde_json::json!({"featureGates": flag_gates}), &Origin::Flag("feature-gates".to_owned()));
        draft.note(&fields, &origin);
        draft.config = draft.complete(&fields, flag_gates)?;
        draft.resolve_paths(path.parent().unwrap_or(Path::new("/")));
        draft.fill_eviction(&fields);
        Ok(draft)
    }

    /// Each is a JSON merge patch on the shown form of the configuration, so that null restores a default.
    pub fn drop_ins(
        mut self,
        documents: &[(PathBuf, Value)],
        flag_gates: &BTreeMap<String, bool>,
    ) -> Result<Draft, Vec<ConfigProblem>> {
        let mut merged = document::shown(&self.config);
        let mut problems = Vec::new();
        for (path, document) in documents {
            let origin = Origin::File(path.clone());
            match fields_of(document, &origin) {
                Ok(fields) => {
                    self.note(&fields, &origin);
                    document::merge(&mut merged, &fields);
                }
                Err(more) => problems.extend(more),
            }
        }
        if !problems.is_empty() {
            return Err(problems);
        }
        self.config = self.complete(&merged, flag_gates)?;
        Ok(self)
    }

    /// Flags win over files, except that gates set only in files stay set.
    pub fn flags(mut self, values: &[FlagValue]) -> Result<Draft, Vec<ConfigProblem>> {
        let mut document = serde_json::to_value(&self.config).expect("a configuration has only string keys");
        for FlagValue { flag, field, value: given } in values {
            let mut value = given.clone();
            if *field == "featureGates" {
                let mut both = document[*field].clone();
                document::merge(&mut both, given);
                value = both;
            }
            self.origins.retain(|path, _| !is_below(path, field) || *field == "featureGates");
            let origin = Origin::Flag(flag.clone());
            self.note(&document::nested(field, given), &origin);
            document::put(&mut document, field, value);
        }
        self.config = document::decode(&document).map_err(|found| self.problems(&document, found))?.config;
        Ok(self)
    }

    /// The configuration if it is valid, else all problems.
    pub fn check(self, host: Host) -> Result<Checked, Vec<ConfigProblem>> {
        let found = validate::validate(&self.config, host);
        if !found.is_empty() {
            let document = serde_json::to_value(&self.config).expect("a configuration has only string keys");
            return Err(self.problems(&document, found));
        }
        let mut warnings = self.warnings;
        warnings.extend(gates::warnings(&self.config.feature_gates));
        let gates = Gates::resolve(&self.config.feature_gates).expect("validation resolved them already");
        Ok(Checked { config: self.config, gates, warnings })
    }

    fn complete(
        &mut self,
        fields: &Value,
        flag_gates: &BTreeMap<String, bool>,
    ) -> Result<KubeletConfiguration, Vec<ConfigProblem>> {
        let document::Decoded { mut config, unknown } =
            document::decode(fields).map_err(|found| self.problems(fields, found))?;
        for field in unknown {
            let place = self.origin_of(&field).map(|origin| format!("{origin}: ")).unwrap_or_default();
            self.warnings.push(format!("{place}unknown field {field:?} is ignored"));
        }
        let mut settings = flag_gates.clone();
        settings.extend(config.feature_gates.clone());
        let gates = Gates::resolve(&settings)
            .map_err(|refusals| self.problems(fields, refusals.into_iter().map(Mismatch::from).collect()))?;
        let given = |name: &str| fields.get(name).is_some_and(|value| !value.is_null());
        if config.node_status_report_frequency == GoDuration::default() || !given("nodeStatusReportFrequency") {
            // Without a report frequency, the update frequency is used for both.
            let update_given =
                given("nodeStatusUpdateFrequency") && config.node_status_update_frequency != GoDuration::default();
            config.node_status_report_frequency =
                if update_given { config.node_status_update_frequency } else { GoDuration::from_secs(300) };
        }
        config.fill_zeroes();
        if !given("serializeImagePulls") {
            config.serialize_image_pulls = config.max_parallel_image_pulls.is_none_or(|most| most < 2);
        }
        config.pod_pids_limit = config.pod_pids_limit.max(-1);
        fill_gated(&mut config, &gates);
        Ok(config)
    }

    /// Relative paths in the main file are relative to it; those in drop-ins are not changed, as upstream.
    fn resolve_paths(&mut self, dir: &Path) {
        let config = &mut self.config;
        for path in [
            &mut config.static_pod_path,
            &mut config.authentication.x509.client_ca_file,
            &mut config.tls_cert_file,
            &mut config.tls_private_key_file,
            &mut config.resolv_conf,
            &mut config.volume_plugin_dir,
            &mut config.pod_logs_dir,
        ] {
            if !path.is_empty() && !path.starts_with('/') {
                *path = cleaned(&dir.join(&*path)).display().to_string();
            }
        }
    }

    fn fill_eviction(&mut self, fields: &Value) {
        let given = fields.get("evictionHard").is_some_and(|value| !value.is_null());
        if !given || self.config.merge_default_eviction_settings {
            for (signal, threshold) in DEFAULT_EVICTION_HARD {
                self.config.eviction_hard.entry((*signal).to_owned()).or_insert_with(|| (*threshold).to_owned());
            }
        }
    }

    fn note(&mut self, fields: &Value, origin: &Origin) {
        self.origins.extend(document::leaf_paths(fields).into_iter().map(|path| (path, origin.clone())));
    }

    /// The origin of the field, of a part of it, or of its section.
    fn origin_of(&self, field: &str) -> Option<&Origin> {
        let related = |path: &str| is_below(path, field) || is_below(field, path);
        let near = || self.origins.iter().find(|(path, _)| related(path)).map(|(_, origin)| origin);
        self.origins.get(field).or_else(near)
    }

    fn problems(&self, document: &Value, found: Vec<Mismatch>) -> Vec<ConfigProblem> {
        let problem = |Mismatch { path, message }: Mismatch| {
            let origin = self.origin_of(&path).cloned();
            if path.starts_with("staticPodURLHeader") {
                // Its values may be credentials, and the message may quote them.
                let message = "expected a list of texts".to_owned();
                return ConfigProblem { origin, field: path, value: None, message };
            }
            let value = document::at(document, &path).filter(|_| !path.is_empty()).cloned();
            ConfigProblem { origin, field: path, value, message }
        };
        found.into_iter().map(problem).collect()
    }
}

/// A valid configuration.
#[derive(Clone, Debug)]
pub struct Checked {
    pub config: KubeletConfiguration,
    pub gates: Gates,
    pub warnings: Vec<String>,
}

const DEFAULT_EVICTION_HARD: &[(&str, &str)] = &[
    ("memory.available", "100Mi"),
    ("nodefs.available", "10%"),
    ("nodefs.inodesFree", "5%"),
    ("imagefs.available", "15%"),
    ("imagefs.inodesFree", "5%"),
];

fn fill_gated(config: &mut KubeletConfiguration, gates: &Gates) {
    let period = &mut config.crash_loop_back_off.max_container_restart_period;
    if gates.enabled(Gate::KubeletCrashLoopBackOffMax) && period.is_none() {
        *period = Some(GoDuration::from_secs(300));
    }
    let policy = &mut config.image_pull_credentials_verification_policy;
    if gates.enabled(Gate::KubeletEnsureSecretPulledImages) && policy.is_empty() {
        "NeverVerifyPreloadedImages".clone_into(policy);
    }
}

/// Whether `path` is inside the field or section `of`.
fn is_below(path: &str, of: &str) -> bool {
    path.strip_prefix(of).is_some_and(|rest| rest.starts_with(['.', '[']))
}

/// Without `.` and `..`, by text alone, as Go's `filepath.Join` does it.
fn cleaned(path: &Path) -> PathBuf {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                clean.pop();
            }
            Component::CurDir => {}
            Component::Prefix(_) | Component::RootDir | Component::Normal(_) => clean.push(part),
        }
    }
    clean
}

/// The document without apiVersion and kind, which must be ours.
fn fields_of(document: &Value, origin: &Origin) -> Result<Value, Vec<ConfigProblem>> {
    let refuse = |field: &str, message: String| {
        let value = document.get(field).cloned();
        vec![ConfigProblem { origin: Some(origin.clone()), field: field.to_owned(), value, message }]
    };
    let Value::Object(fields) = document else {
        return Err(refuse("", format!("expected an object of kind {KIND}, apiVersion {API_VERSION}")));
    };
    let mut fields = fields.clone();
    for (name, wanted) in [("kind", KIND), ("apiVersion", API_VERSION)] {
        match fields.remove(name) {
            Some(Value::String(found)) if found == wanted => {}
            Some(_) => return Err(refuse(name, format!("must be {wanted}"))),
            None => return Err(refuse(name, format!("is missing, must be {wanted}"))),
        }
    }
    Ok(Value::Object(fields))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// Upstream's results: a configuration as given, and the complete one that `/configz` then shows.
    const UPSTREAM: &str = include_str!("../../testdata/complete.jsonl");

    fn document(mut fields: Value) -> Value {
        fields["apiVersion"] = json!(API_VERSION);
        fields["kind"] = json!(KIND);
        fields
    }

    fn file(fields: Value) -> Result<Draft, Vec<ConfigProblem>> {
        Draft::from_file(Path::new("/etc/kubelet/config.yaml"), &document(fields), &BTreeMap::new())
    }

    fn drop_in(name: &str, fields: Value) -> (PathBuf, Value) {
        (Path::new("/etc/kubelet.d").join(name), document(fields))
    }

    fn flag(name: &str, field: &'static str, value: Value) -> FlagValue {
        FlagValue { flag: name.to_owned(), field, value }
    }

    fn shown(problems: &[ConfigProblem]) -> String {
        problems.iter().map(ConfigProblem::to_string).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn defaults_are_upstreams() {
        for line in UPSTREAM.lines() {
            let case: Value = serde_json::from_str(line).unwrap();
            let mut draft = file(case["given"].clone()).unwrap();
            // Upstream sets these where it reads the file, which is not part of its result.
            if case["given"].get("evictionHard").is_none() {
                draft.config.eviction_hard.clear();
            }
            assert_eq!(document::shown(&draft.config), case["shown"], "{}", case["given"]);
        }
        assert!(UPSTREAM.lines().count() > 15, "upstream's answers are there");
    }

    #[test]
    fn without_a_file_four_defaults_are_older_and_nothing_is_evicted() {
        let (old, new) = (Draft::without_file().config, Draft::empty_file().config);
        let (old, new) = (document::shown(&old), document::shown(&new));
        let changed = |name: &str| format!("{name}: {} / {}", old[name], new[name]);
        let names = ["authentication", "authorization", "evictionHard", "readOnlyPort"];
        insta::assert_snapshot!(names.map(changed).join("\n"), @r#"
        authentication: {"anonymous":{"enabled":true},"webhook":{"cacheTTL":"2m0s","enabled":false},"x509":{}} / {"anonymous":{"enabled":false},"webhook":{"cacheTTL":"2m0s","enabled":true},"x509":{}}
        authorization: {"mode":"AlwaysAllow","webhook":{"cacheAuthorizedTTL":"5m0s","cacheUnauthorizedTTL":"30s"}} / {"mode":"Webhook","webhook":{"cacheAuthorizedTTL":"5m0s","cacheUnauthorizedTTL":"30s"}}
        evictionHard: null / {"imagefs.available":"15%","imagefs.inodesFree":"5%","memory.available":"100Mi","nodefs.available":"10%","nodefs.inodesFree":"5%"}
        readOnlyPort: 10255 / null
        "#);
        let differs = |name: &&String| old.get(name.as_str()) != new.get(name.as_str());
        let keys = old.as_object().unwrap().keys().chain(new.as_object().unwrap().keys());
        let found: std::collections::BTreeSet<&String> = keys.filter(differs).collect();
        assert_eq!(found.into_iter().collect::<Vec<_>>(), names);
    }

    #[test]
    fn flags_win_over_drop_ins_and_drop_ins_over_the_file() {
        let draft = file(json!({"maxPods": 1, "port": 1, "podsPerCore": 1, "clusterDNS": ["1", "2"]})).unwrap();
        let draft = draft
            .drop_ins(
                &[
                    drop_in("10.conf", json!({"maxPods": 2, "port": 2, "clusterDNS": ["3"]})),
                    drop_in("20.conf", json!({"maxPods": 3})),
                ],
                &BTreeMap::new(),
            )
            .unwrap();
        let config = draft.flags(&[flag("port", "port", json!(4))]).unwrap().config;
        assert_eq!((config.max_pods, config.port, config.pods_per_core, config.max_open_files), (3, 4, 1, 1_000_000));
        assert_eq!(config.cluster_dns, ["3"]);
    }

    #[test]
    fn null_in_a_drop_in_restores_the_default() {
        let base = json!({"maxPods": 1, "evictionHard": {"memory.available": "1Gi", "pid.available": "5%"}});
        let patch = json!({"maxPods": null, "evictionHard": {"memory.available": "2Gi", "nodefs.available": "1%"}});
        let config = file(base).unwrap().drop_ins(&[drop_in("a.conf", patch)], &BTreeMap::new()).unwrap().config;
        assert_eq!(config.max_pods, 110);
        let eviction: Vec<String> = config.eviction_hard.iter().map(|(k, v)| format!("{k}<{v}")).collect();
        assert_eq!(eviction, ["memory.available<2Gi", "nodefs.available<1%", "pid.available<5%"]);
    }

    #[test]
    fn eviction_defaults_apply_if_unset_or_merging() {
        let thresholds = |fields: Value| file(fields).unwrap().config.eviction_hard.len();
        assert_eq!(thresholds(json!({})), 5);
        assert_eq!(thresholds(json!({"evictionHard": {}})), 0);
        assert_eq!(thresholds(json!({"evictionHard": {"memory.available": "1Gi"}})), 1);
        let merging = json!({"evictionHard": {"memory.available": "1Gi"}, "mergeDefaultEvictionSettings": true});
        assert_eq!(thresholds(merging.clone()), 5);
        assert_eq!(file(merging).unwrap().config.eviction_hard["memory.available"], "1Gi");
    }

    #[test]
    fn gates_of_files_stay_when_flags_set_others() {
        let draft = file(json!({"featureGates": {"MemoryQoS": true, "PodsAPI": true}})).unwrap();
        let draft = draft.flags(&[flag("feature-gates", "featureGates", json!({"PodsAPI": false}))]).unwrap();
        assert_eq!(json!(draft.config.feature_gates), json!({"MemoryQoS": true, "PodsAPI": false}));
    }

    #[test]
    fn a_flag_may_set_zero_where_a_file_means_the_default() {
        assert_eq!(file(json!({"registryBurst": 0})).unwrap().config.registry_burst, 10);
        let draft = Draft::without_file().flags(&[flag("registry-burst", "registryBurst", json!(0))]).unwrap();
        assert_eq!(draft.config.registry_burst, 0);
    }

    #[test]
    fn relative_paths_in_the_file_are_relative_to_it() {
        let config =
            file(json!({"staticPodPath": "manifests", "tlsCertFile": "/abs", "podLogsDir": "../logs"})).unwrap().config;
        assert_eq!(config.static_pod_path, "/etc/kubelet/manifests");
        assert_eq!((config.tls_cert_file.as_str(), config.pod_logs_dir.as_str()), ("/abs", "/etc/logs"));
        let draft = file(json!({}))
            .unwrap()
            .drop_ins(&[drop_in("a.conf", json!({"staticPodPath": "rel"}))], &BTreeMap::new())
            .unwrap();
        assert_eq!(draft.config.static_pod_path, "rel");
    }

    #[test]
    fn every_problem_names_the_origin_of_its_field() {
        let draft =
            file(json!({"registryBurst": -1, "staticPodURL": "x", "authentication": {"webhook": {"cacheTTL": "1m"}}}))
                .unwrap();
        let patch = json!({"hairpinMode": "loop", "crashLoopBackOff": {"maxContainerRestartPeriod": "1h"}});
        let draft = draft.drop_ins(&[drop_in("a.conf", patch)], &BTreeMap::new()).unwrap();
        let draft = draft.flags(&[flag("max-pods", "maxPods", json!(-5))]).unwrap();
        insta::assert_snapshot!(shown(&draft.check(Host::CgroupV1).unwrap_err()), @r#"
        flag --max-pods: maxPods = -5: invalid configuration: maxPods (--max-pods) -5 must not be a negative number
        /etc/kubelet/config.yaml: registryBurst = -1: invalid configuration: registryBurst (--registry-burst) -1 must not be a negative number
        /etc/kubelet.d/a.conf: hairpinMode = "loop": invalid configuration: option "loop" specified for hairpinMode (--hairpin-mode). Valid options are "none", "hairpin-veth" or "promiscuous-bridge"
        /etc/kubelet.d/a.conf: crashLoopBackOff.maxContainerRestartPeriod = "1h0m0s": invalid configuration: CrashLoopBackOff.MaxContainerRestartPeriod (got: 3600 seconds) must be set between 1s and 300s
        failCgroupV1 = true: kubelet is configured to not run on a host using cgroup v1. cgroup v1 support is unsupported and will be removed in a future release
        "#);
    }

    #[test]
    fn gate_problem_names_the_origin_of_the_gate() {
        let draft = file(json!({"featureGates": {"MemoryQoS": true}})).unwrap();
        let gates = json!({"PodsAPI": true, "NodeSwap": false});
        let draft = draft.flags(&[flag("feature-gates", "featureGates", gates)]).unwrap();
        let refused = shown(&draft.check(Host::CgroupV2).unwrap_err());
        insta::assert_snapshot!(refused, @"flag --feature-gates: featureGates.NodeSwap = false: cannot set feature gate NodeSwap to false, feature is locked to true");
    }

    #[test]
    fn decoding_error_names_its_file() {
        let file_problems =
            file(json!({"port": "x", "featureGates": {"A": "yes"}, "staticPodURLHeader": {"Authorization": 5}}))
                .unwrap_err();
        let drop_in_problems = file(json!({"port": 1}))
            .unwrap()
            .drop_ins(&[drop_in("a.conf", json!({"maxPods": 1.5}))], &BTreeMap::new())
            .unwrap_err();
        let gate_problems = file(json!({"featureGates": {"Nope": true, "NodeSwap": false}})).unwrap_err();
        insta::assert_snapshot!([shown(&file_problems), shown(&drop_in_problems), shown(&gate_problems)].join("\n"), @r#"
        /etc/kubelet/config.yaml: featureGates.A = "yes": invalid type: string "yes", expected a boolean
        /etc/kubelet/config.yaml: port = "x": invalid type: string "x", expected i32
        /etc/kubelet/config.yaml: staticPodURLHeader.Authorization: expected a list of texts
        /etc/kubelet.d/a.conf: maxPods = 1.5: invalid type: floating point `1.5`, expected i32
        /etc/kubelet/config.yaml: featureGates.NodeSwap = false: cannot set feature gate NodeSwap to false, feature is locked to true
        /etc/kubelet/config.yaml: featureGates.Nope = true: unrecognized feature gate: Nope
        "#);
    }

    #[test]
    fn a_document_of_another_kind_is_refused() {
        let refuse =
            |document: Value| shown(&Draft::from_file(Path::new("/c"), &document, &BTreeMap::new()).unwrap_err());
        let documents = [
            json!({"kind": KIND}),
            json!({"kind": "Pod", "apiVersion": "v1"}),
            json!({"apiVersion": API_VERSION}),
            json!([1]),
            json!({"kind": KIND, "apiVersion": "kubelet.config.k8s.io/v1"}),
        ];
        insta::assert_snapshot!(documents.map(refuse).join("\n"), @r#"
        /c: apiVersion: is missing, must be kubelet.config.k8s.io/v1beta1
        /c: kind = "Pod": must be KubeletConfiguration
        /c: kind: is missing, must be KubeletConfiguration
        /c: expected an object of kind KubeletConfiguration, apiVersion kubelet.config.k8s.io/v1beta1
        /c: apiVersion = "kubelet.config.k8s.io/v1": must be kubelet.config.k8s.io/v1beta1
        "#);
    }

    #[test]
    fn unknown_fields_are_ignored_with_a_warning_that_names_the_file() {
        let draft = file(json!({"prot": 1})).unwrap();
        let draft =
            draft.drop_ins(&[drop_in("a.conf", json!({"logging": {"color": true}}))], &BTreeMap::new()).unwrap();
        insta::assert_snapshot!(draft.warnings.join("\n"), @r#"
        /etc/kubelet/config.yaml: unknown field "prot" is ignored
        /etc/kubelet.d/a.conf: unknown field "logging.color" is ignored
        "#);
    }

    #[test]
    fn gate_disabled_by_flag_gives_no_default() {
        let off = BTreeMap::from([("KubeletCrashLoopBackOffMax".to_owned(), false)]);
        let draft = Draft::from_file(Path::new("/c"), &document(json!({})), &off).unwrap();
        assert_eq!(draft.config.crash_loop_back_off.max_container_restart_period, None);
        let draft = draft.drop_ins(&[drop_in("a.conf", json!({"maxPods": 1}))], &off).unwrap();
        assert_eq!(draft.config.crash_loop_back_off.max_container_restart_period, None);
        let unknown = BTreeMap::from([("Nope".to_owned(), true)]);
        let problems = Draft::from_file(Path::new("/c"), &document(json!({})), &unknown).unwrap_err();
        assert_eq!(shown(&problems), "flag --feature-gates: featureGates.Nope: unrecognized feature gate: Nope");
    }

    proptest! {
        #[test]
        fn completing_a_complete_configuration_changes_nothing(
            max_pods in -1..3_i32, qps in -1..3_i32, pulls in proptest::option::of(0..4_i32), pids in -3..3_i64,
            update_secs in proptest::option::of(0..3_i64), serialize in proptest::option::of(any::<bool>()), allocatable in 0..2_usize,
        ) {
            let fields = json!({
                "maxPods": max_pods, "registryPullQPS": qps, "maxParallelImagePulls": pulls, "podPidsLimit": pids,
                "nodeStatusUpdateFrequency": update_secs.map(GoDuration::from_secs), "serializeImagePulls": serialize,
                "enforceNodeAllocatable": vec!["pods"; allocatable],
            });
            let once = file(fields).unwrap().drop_ins(&[], &BTreeMap::new()).unwrap().config;
            let twice = file(document::shown(&once)).unwrap().drop_ins(&[], &BTreeMap::new()).unwrap().config;
            prop_assert_eq!(once, twice);
        }
    }
}
