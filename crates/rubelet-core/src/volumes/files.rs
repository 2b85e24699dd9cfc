//! Volumes of files with API content: configMap, secret, downwardAPI, projected.
//!
//! Owns: the sources of such a volume, the objects and tokens it needs, and its files. Never: gathers or writes them.
//! Upstream: `pkg/volume/{configmap,secret,downwardapi,projected}`.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, DownwardAPIVolumeFile, KeyToPath, Pod, PodSpec, Volume, VolumeProjection};

use crate::{
    container::{ConfigError, find},
    downward_api::{metadata_value, resource_value},
    id::{PodUid, name_of, namespace_of},
    needs::Needs,
    objects::{ObjectKey, Objects, Presence},
    settings::Allocatable,
    volumes::{
        fs_group,
        pod_certificates::{CertificateKey, CertificateSource, CredentialBundle},
        trust_bundles::TrustBundleSource,
    },
};

/// As the API server defaults it.
const DEFAULT_MODE: i32 = 0o644;
const DEFAULT_TOKEN_SECS: i64 = 3600;
/// A token in a volume with an owner is only readable by that owner; fsGroup adds the pod's group.
const TOKEN_MODE: u32 = 0o600;
const MAX_PATH_BYTES: usize = 4096;
const MAX_NAME_BYTES: usize = 255;
/// The maximum size of one volume. An API object has about a megabyte, but a pod may name it in any number of items.
const MAX_VOLUME_BYTES: usize = 64 << 20;

#[derive(Clone, Debug, PartialEq)]
pub struct FileVolume {
    pub plugin: FilePlugin,
    parts: Vec<Part>,
    default_mode: u32,
    /// The pod's fsGroup.
    pub group: Option<u32>,
    /// The user all containers of the pod run as, if they run as one.
    user: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilePlugin {
    ConfigMap,
    Secret,
    DownwardApi,
    Projected,
}

impl FilePlugin {
    /// The name of its directory in a pod's `volumes`.
    pub fn dir_name(self) -> &'static str {
        match self {
            FilePlugin::ConfigMap => "kubernetes.io~configmap",
            FilePlugin::Secret => "kubernetes.io~secret",
            FilePlugin::DownwardApi => "kubernetes.io~downward-api",
            FilePlugin::Projected => "kubernetes.io~projected",
        }
    }

    /// `None` for a volume of another kind.
    pub fn of(volume: &Volume) -> Option<Self> {
        if volume.config_map.is_some() {
            Some(FilePlugin::ConfigMap)
        } else if volume.secret.is_some() {
            Some(FilePlugin::Secret)
        } else if volume.downward_api.is_some() {
            Some(FilePlugin::DownwardApi)
        } else {
            volume.projected.is_some().then_some(FilePlugin::Projected)
        }
    }

    /// Config maps are not secret and stay on disk, as upstream.
    pub fn is_in_memory(self) -> bool {
        self != FilePlugin::ConfigMap
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Part {
    Object { key: ObjectKey, items: Vec<KeyToPath>, presence: Presence },
    Fields(Vec<DownwardAPIVolumeFile>),
    Token { key: TokenKey, path: String },
    TrustBundle(TrustBundleSource),
    Certificate(CertificateSource),
}

/// The key of a service account token.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TokenKey {
    pub namespace: String,
    pub service_account: String,
    /// The token is bound to this pod and ends with it.
    pub pod_name: String,
    pub pod_uid: PodUid,
    /// `None`: the API server itself.
    pub audience: Option<String>,
    pub expiration_secs: i64,
}

/// A service account token.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    pub token: String,
    pub expires_at: Timestamp,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token").field("expires_at", &self.expires_at).finish_non_exhaustive()
    }
}

#[derive(Clone, Default)]
pub struct Gathered {
    pub objects: Objects,
    /// A token, or why it is missing.
    pub tokens: BTreeMap<TokenKey, Result<Token, String>>,
    /// A pod's certificate and its key, or why there is none.
    pub certificates: BTreeMap<CertificateKey, Result<CredentialBundle, String>>,
}

/// Tokens are secrets: never in a log.
impl fmt::Debug for Gathered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gathered").field("objects", &self.objects).finish_non_exhaustive()
    }
}

#[derive(Clone, PartialEq, Eq)]
pub struct VolumeFile {
    pub content: Vec<u8>,
    pub mode: u32,
    pub owner: Option<u32>,
}

impl fmt::Debug for VolumeFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes, mode {:o}, owner {:?}", self.content.len(), self.mode, self.owner)
    }
}

pub type Files = BTreeMap<PathBuf, VolumeFile>;

impl FileVolume {
    /// `None` for a volume of another kind.
    pub fn of(pod: &Pod, spec: &PodSpec, volume: &Volume) -> Option<Self> {
        let namespace = namespace_of(pod);
        let (parts, default_mode) = if let Some(source) = &volume.config_map {
            let key = ObjectKey::config_map(namespace, &source.name);
            (vec![object_part(key, source.items.as_ref(), source.optional)], source.default_mode)
        } else if let Some(source) = &volume.secret {
            let key = ObjectKey::secret(namespace, source.secret_name.as_deref().unwrap_or_default());
            (vec![object_part(key, source.items.as_ref(), source.optional)], source.default_mode)
        } else if let Some(source) = &volume.downward_api {
            (vec![Part::Fields(source.items.clone().unwrap_or_default())], source.default_mode)
        } else {
            let source = volume.projected.as_ref()?;
            let parts = source.sources.iter().flatten().enumerate();
            let parts = parts.filter_map(|(index, part)| projected_part(pod, (&volume.name, index), part));
            (parts.collect(), source.default_mode)
        };
        Some(FileVolume {
            plugin: FilePlugin::of(volume)?,
            parts,
            default_mode: mode_bits(default_mode.unwrap_or(DEFAULT_MODE)),
            group: fs_group(spec),
            user: only_user(spec),
        })
    }

    /// What must be gathered before the files can be made.
    pub fn needs(&self) -> Needs {
        let mut needs = Needs::default();
        for part in &self.parts {
            match part {
                Part::Object { key, .. } => {
                    needs.objects.insert(key.clone());
                }
                Part::Token { key, .. } => {
                    needs.tokens.insert(key.clone());
                }
                Part::TrustBundle(source) => needs.objects.extend(source.key.clone()),
                Part::Certificate(source) => {
                    needs.certificates.insert(source.key.clone());
                }
                Part::Fields(_) => {}
            }
        }
        needs
    }

    /// The files, or all errors. Of two files with one path the later wins.
    pub fn files(
        &self,
        pod: &Pod,
        uid: &PodUid,
        gathered: &Gathered,
        allocatable: Allocatable,
    ) -> Result<Files, ConfigError> {
        let mut content = Content::default();
        let mut problems = Vec::new();
        for part in &self.parts {
            let made = match part {
                Part::Object { key, items, presence } => {
                    self.object_files(key, items, *presence, &gathered.objects, &mut content)
                }
                Part::Fields(items) => self.field_files(items, pod, uid, allocatable, &mut content),
                Part::Token { key, path } => self.token_file(key, path, &gathered.tokens, &mut content),
                Part::TrustBundle(source) => {
                    let found = source.content(&gathered.objects, uid);
                    found.and_then(|bundle| self.private_file(&source.path, &bundle, &mut content))
                }
                Part::Certificate(source) => self.certificate_files(source, &gathered.certificates, &mut content),
            };
            problems.extend(made.err().map(|problem| problem.0));
        }
        match problems.as_slice() {
            [] => Ok(content.files),
            [problem] => Err(ConfigError(problem.clone())),
            more => Err(ConfigError(format!("[{}]", more.join(", ")))),
        }
    }

    fn object_files(
        &self,
        key: &ObjectKey,
        items: &[KeyToPath],
        presence: Presence,
        objects: &Objects,
        made: &mut Content,
    ) -> Result<(), ConfigError> {
        let found = objects.find(key, presence).map_err(|error| ConfigError(error.message))?;
        let Some(object) = found else { return Ok(()) };
        if items.is_empty() {
            for (name, content) in object.data().iter().chain(object.binary_data()) {
                made.insert(name, content, self.mode(None), None)?;
            }
        }
        for item in items {
            match object.data().get(&item.key).or_else(|| object.binary_data().get(&item.key)) {
                Some(content) => made.insert(&item.path, content, self.mode(item.mode), None)?,
                None if presence == Presence::Optional => {}
                None => return Err(ConfigError(key.no_such_key(&item.key))),
            }
        }
        Ok(())
    }

    fn field_files(
        &self,
        items: &[DownwardAPIVolumeFile],
        pod: &Pod,
        uid: &PodUid,
        allocatable: Allocatable,
        made: &mut Content,
    ) -> Result<(), ConfigError> {
        for item in items {
            let content = if let Some(field) = &item.field_ref {
                metadata_value(pod, uid, &field.field_path)?
            } else if let Some(field) = &item.resource_field_ref {
                let name = field.container_name.as_deref().unwrap_or_default();
                let container = find(pod, name).map_err(|_| ConfigError(format!("container {name} not found")))?;
                resource_value(field, &container, allocatable)?
            } else {
                String::new()
            };
            made.insert(&item.path, content.as_bytes(), self.mode(item.mode), None)?;
        }
        Ok(())
    }

    fn token_file(
        &self,
        key: &TokenKey,
        path: &str,
        tokens: &BTreeMap<TokenKey, Result<Token, String>>,
        made: &mut Content,
    ) -> Result<(), ConfigError> {
        let token = match tokens.get(key) {
            Some(Ok(Token { token, .. })) => token,
            Some(Err(problem)) => return Err(ConfigError(problem.clone())),
            None => return Err(ConfigError("the token was not gathered".to_owned())),
        };
        self.private_file(path, token.as_bytes(), made)
    }

    fn certificate_files(
        &self,
        source: &CertificateSource,
        certificates: &BTreeMap<CertificateKey, Result<CredentialBundle, String>>,
        made: &mut Content,
    ) -> Result<(), ConfigError> {
        let bundle = match certificates.get(&source.key) {
            Some(Ok(bundle)) => bundle,
            Some(Err(problem)) => return Err(ConfigError(problem.clone())),
            None => return Err(ConfigError("the certificate was not gathered".to_owned())),
        };
        source.files(bundle).iter().try_for_each(|(path, content)| self.private_file(path, content, made))
    }

    /// Of the pod's user, if its containers have one.
    fn private_file(&self, path: &str, content: &[u8], made: &mut Content) -> Result<(), ConfigError> {
        let has_owner = self.user.is_some() || self.group.is_some();
        let mode = if has_owner { TOKEN_MODE } else { self.default_mode };
        made.insert(path, content, mode, self.user)
    }

    fn mode(&self, of_item: Option<i32>) -> u32 {
        of_item.map_or(self.default_mode, mode_bits)
    }
}

/// The files made so far, and their size.
#[derive(Default)]
struct Content {
    files: Files,
    bytes: usize,
}

impl Content {
    fn insert(&mut self, path: &str, content: &[u8], mode: u32, owner: Option<u32>) -> Result<(), ConfigError> {
        let place = checked(path)?;
        let replaced = self.files.get(&place).map_or(0, |file| file.content.len());
        self.bytes = self.bytes - replaced + content.len();
        if self.bytes > MAX_VOLUME_BYTES {
            return Err(ConfigError(format!("the files up to {path} hold more than {MAX_VOLUME_BYTES} bytes")));
        }
        self.files.insert(place, VolumeFile { content: content.to_vec(), mode, owner });
        Ok(())
    }
}

fn object_part(key: ObjectKey, items: Option<&Vec<KeyToPath>>, optional: Option<bool>) -> Part {
    Part::Object { key, items: items.cloned().unwrap_or_default(), presence: optional.into() }
}

fn projected_part(pod: &Pod, (volume, index): (&str, usize), part: &VolumeProjection) -> Option<Part> {
    let namespace = namespace_of(pod);
    if let Some(source) = &part.secret {
        return Some(object_part(ObjectKey::secret(namespace, &source.name), source.items.as_ref(), source.optional));
    }
    if let Some(source) = &part.config_map {
        let key = ObjectKey::config_map(namespace, &source.name);
        return Some(object_part(key, source.items.as_ref(), source.optional));
    }
    if let Some(source) = &part.downward_api {
        return Some(Part::Fields(source.items.clone().unwrap_or_default()));
    }
    if let Some(source) = &part.service_account_token {
        return Some(Part::Token {
            key: TokenKey::of(pod, source.audience.as_deref(), source.expiration_seconds),
            path: source.path.clone(),
        });
    }
    if let Some(source) = &part.cluster_trust_bundle {
        return Some(Part::TrustBundle(TrustBundleSource::of(source)));
    }
    let source = part.pod_certificate.as_ref()?;
    Some(Part::Certificate(CertificateSource::of(pod, volume, index, source)))
}

impl TokenKey {
    /// A token of the pod's service account. An empty audience is none.
    pub fn of(pod: &Pod, audience: Option<&str>, expiration_secs: Option<i64>) -> Self {
        let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.as_deref());
        TokenKey {
            namespace: namespace_of(pod).to_owned(),
            service_account: account.filter(|name| !name.is_empty()).unwrap_or("default").to_owned(),
            pod_name: name_of(pod).to_owned(),
            pod_uid: PodUid::of(pod),
            audience: audience.filter(|audience| !audience.is_empty()).map(str::to_owned),
            expiration_secs: expiration_secs.unwrap_or(DEFAULT_TOKEN_SECS),
        }
    }
}

/// `None` when containers run as several users, or one of them as its image's user.
fn only_user(spec: &PodSpec) -> Option<u32> {
    let of_pod = spec.security_context.as_ref().and_then(|context| context.run_as_user);
    let of = |container: &Container| container.security_context.as_ref().and_then(|own| own.run_as_user).or(of_pod);
    let mut users = spec.init_containers.iter().flatten().chain(&spec.containers).map(of);
    let first = users.next()??;
    users.all(|user| user == Some(first)).then_some(u32::try_from(first).ok()?)
}

fn mode_bits(mode: i32) -> u32 {
    mode.unsigned_abs() & 0o7777
}

/// A path below the volume, or upstream's error. Names that begin with `..` are reserved.
fn checked(path: &str) -> Result<PathBuf, ConfigError> {
    let invalid = |why: String| Err(ConfigError(format!("invalid path: {why}")));
    if path.is_empty() {
        return invalid("must not be empty: \"\"".to_owned());
    }
    if path.starts_with('/') {
        return invalid(format!("must be relative path: {path}"));
    }
    if path.len() > MAX_PATH_BYTES {
        return invalid(format!("must be less than or equal to {MAX_PATH_BYTES} characters"));
    }
    for name in path.split('/') {
        if name == ".." {
            return invalid(format!("must not contain '..': {path}"));
        }
        if name.len() > MAX_NAME_BYTES {
            return invalid(format!("filenames must be less than or equal to {MAX_NAME_BYTES} characters"));
        }
    }
    if path.starts_with("..") {
        return invalid(format!("must not start with '..': {path}"));
    }
    Ok(path.split('/').filter(|name| !matches!(*name, "" | ".")).collect())
}

#[cfg(test)]
mod tests;
