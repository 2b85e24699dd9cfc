//! From what was given to a complete configuration: files, drop-ins and flags, each over the one before.
//!
//! Owns: order, defaults that depend on other fields, and who set what. Never: reads a file; the shell hands over documents.
//! Upstream: `cmd/kubelet/app/server.go` (NewKubeletCommand, loadConfigFile, mergeKubeletConfigurations, kubeletConfigFlagPrecedence), `applyLegacyDefaults`.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
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

/// Who gave a field its value. Nobody: it has its default.
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

/// Something that keeps the agent from starting.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    pub origin: Option<Origin>,
    /// A dotted path; empty when it is about the whole document.
    pub field: String,
    pub value: Option<Value>,
    /// Says what is allowed; upstream's words where it has any.
    pub message: String,
}

impl fmt::Display for Problem {
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

/// A configuration while it is being put together.
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
    /// Without a configuration file the defaults are those of the time before there were files.
    pub fn without_file() -> Draft {
        let mut config = KubeletConfiguration::default();
        fill_gated(&mut config, &Gates::default());
        config.authentication.anonymous.enabled = true;
        config.authentication.webhook.enabled = false;
        config.authorization.mode = "AlwaysAllow".to_owned();
        config.read_only_port = 10255;
        Draft { config, origins: BTreeMap::new(), warnings: Vec::new() }
    }

    /// What a file without any field gives.
    pub fn empty_file() -> Draft {
        let document = serde_json::json!({"apiVersion": API_VERSION, "kind": KIND});
        Draft::from_file(Path::new("/"), &document, &BTreeMap::new()).expect("there is nothing in it to refuse")
    }

    /// `flag_gates` are on or off already while the file gets its defaults, as upstream has it.
    pub fn from_file(
        path: &Path,
        document: &Value,
        flag_gates: &BTreeMap<String, bool>,
    ) -> Result<Draft, Vec<Problem>> {
        let origin = Origin::File(path.to_owned());
        let fields = fields_of(document, &origin)?;
        let mut draft =
            Draft { config: KubeletConfiguration::default(), origins: BTreeMap::new(), warnings: Vec::new() };
        draft.note(&fields, &origin);
        draft.config = draft.complete(&fields, flag_gates)?;
        draft.resolve_paths(path.parent().unwrap_or(Path::new("/")));
        draft.fill_eviction(&fields);
        Ok(draft)
    }

    /// Each is a JSON merge patch on the shown form of what is there, so that null brings back a default.
    pub fn drop_ins(mut self, documents: &[(PathBuf, Value)]) -> Result<Draft, Vec<Problem>> {
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
        self.config = self.complete(&merged, &BTreeMap::new())?;
        Ok(self)
    }

    /// Flags win over files, except that gates only files set stay set.
    pub fn flags(mut self, values: &[FlagValue]) -> Result<Draft, Vec<Problem>> {
        let mut document = serde_json::to_value(&self.config).expect("a configuration has only string keys");
        for FlagValue { flag, field, value } in values {
            let mut value = value.clone();
            if *field == "featureGates" {
                let mut both = document[*field].clone();
                document::merge(&mut both, &value);
                value = both;
            }
            self.origins.insert((*field).to_owned(), Origin::Flag(flag.clone()));
            document::put(&mut document, field, value);
        }
        self.config = document::decode(&document).map_err(|found| self.problems(&document, found))?.config;
        Ok(self)
    }

    /// The configuration, if every rule holds; else everything that is wrong with it.
    pub fn check(self, host: Host) -> Result<Checked, Vec<Problem>> {
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
    ) -> Result<KubeletConfiguration, Vec<Problem>> {
        let document::Decoded { mut config, unknown } =
            document::decode(fields).map_err(|found| self.problems(fields, found))?;
        for field in unknown {
            let place = self.origin_of(&field).map(|origin| format!("{origin}: ")).unwrap_or_default();
            self.warnings.push(format!("{place}unknown field {field:?} is ignored"));
        }
        let mut wanted = flag_gates.clone();
        wanted.extend(config.feature_gates.clone());
        let gates = Gates::resolve(&wanted).map_err(|refusals| {
            let mismatch = |message| Mismatch { path: "featureGates".to_owned(), message };
            self.problems(fields, refusals.into_iter().map(|refusal| mismatch(refusal.message)).collect())
        })?;
        let given = |name: &str| fields.get(name).is_some_and(|value| !value.is_null());
        if config.node_status_report_frequency == GoDuration::default() || !given("nodeStatusReportFrequency") {
            // Before there was a report frequency, the update frequency was both.
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

    /// Relative paths in the main file are relative to it; drop-ins are not treated so, as in upstream.
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
                *path = dir.join(&*path).components().collect::<PathBuf>().display().to_string();
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

    /// Whoever set the field, a part of it, or the section it is in.
    fn origin_of(&self, field: &str) -> Option<&Origin> {
        let above = |path: &str, inner: &str| inner.strip_prefix(path).is_some_and(|rest| rest.starts_with(['.', '[']));
        self.origins
            .get(field)
            .or_else(|| self.origins.iter().find(|(path, _)| above(field, path) || above(path, field)).map(|(_, o)| o))
    }

    fn problems(&self, document: &Value, found: Vec<Mismatch>) -> Vec<Problem> {
        let problem = |Mismatch { path, message }: Mismatch| {
            // Its values may be credentials.
            let secret = path.starts_with("staticPodURLHeader");
            let value = document::at(document, &path).filter(|_| !secret && !path.is_empty()).cloned();
            Problem { origin: self.origin_of(&path).cloned(), field: path, value, message }
        };
        found.into_iter().map(problem).collect()
    }
}

/// A configuration that every rule holds for.
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

/// The document without its type, which must be ours.
fn fields_of(document: &Value, origin: &Origin) -> Result<Value, Vec<Problem>> {
    let refuse = |field: &str, message: String| {
        let value = document.get(field).cloned();
        vec![Problem { origin: Some(origin.clone()), field: field.to_owned(), value, message }]
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
