//! How to reach the API server, and as whom: the kubeconfig file.
//!
//! Owns: which fields are read, what they mean together, and the words for what is wrong with them.
//! Never: connects; reads the files a kubeconfig names (but tells where they are).
//! Upstream: `client-go/tools/clientcmd`.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::Uri;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

/// The cluster and the user of the current context.
#[derive(Clone, Debug)]
pub struct Kubeconfig {
    /// Where it was read, for messages.
    pub path: PathBuf,
    pub cluster: Cluster,
    pub user: User,
}

#[derive(Clone, Debug)]
pub struct Cluster {
    pub server: Uri,
    /// Without one the node's own authorities count.
    pub certificate_authority: Option<Source>,
    /// The name the server's certificate must have, where it is not the server's host.
    pub tls_server_name: Option<String>,
    pub verification: Verification,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verification {
    Required,
    /// `insecure-skip-tls-verify`.
    Skipped,
}

#[derive(Clone, Debug)]
pub struct User {
    pub certificate: Option<ClientCertificate>,
    pub authorization: Authorization,
}

#[derive(Clone, Debug)]
pub struct ClientCertificate {
    pub certificate: Source,
    pub key: Source,
}

/// What goes into the `Authorization` header.
#[derive(Clone)]
pub enum Authorization {
    None,
    Token(String),
    TokenFile(PathBuf),
    Basic { username: String, password: String },
}

/// Names the way, never the secret.
impl fmt::Debug for Authorization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Authorization::None => f.write_str("None"),
            Authorization::Token(_) => f.write_str("Token"),
            Authorization::TokenFile(path) => f.debug_tuple("TokenFile").field(path).finish(),
            Authorization::Basic { username, .. } => f.debug_tuple("Basic").field(username).finish(),
        }
    }
}

/// Where PEM is: beside the kubeconfig, or in it.
#[derive(Clone, PartialEq, Eq)]
pub enum Source {
    File(PathBuf),
    Data(Vec<u8>),
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::File(path) => f.debug_tuple("File").field(path).finish(),
            Source::Data(bytes) => write!(f, "Data({} bytes)", bytes.len()),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kubeconfig {}: {message}", path.display())]
pub struct KubeconfigError {
    path: PathBuf,
    message: String,
}

/// Certificates and keys in it make a kubeconfig a few KiB long.
const MAX_BYTES: u64 = 1 << 20;

impl Kubeconfig {
    pub fn read(path: &Path) -> Result<Self, KubeconfigError> {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let wrong = |message: String| KubeconfigError { path: path.clone(), message };
        let length = std::fs::metadata(&path).map_err(|error| wrong(error.to_string()))?.len();
        if length > MAX_BYTES {
            return Err(wrong(format!("is {length} bytes long, at most {MAX_BYTES} are read")));
        }
        let text = std::fs::read(&path).map_err(|error| wrong(error.to_string()))?;
        Self::parse(&text, &path).map_err(wrong)
    }

    /// `path` is where the text comes from: files it names are relative to it.
    fn parse(text: &[u8], path: &Path) -> Result<Self, String> {
        let file: File = serde_json::from_value(yaml(text)?).map_err(|error| error.to_string())?;
        if file.current_context.is_empty() {
            return Err("`current-context` is empty: name one of `contexts`".to_owned());
        }
        let context: Context = chosen("context", &file.contexts, &file.current_context)?;
        let cluster: RawCluster = chosen("cluster", &file.clusters, &context.cluster)?;
        let user = match context.user.as_str() {
            // Upstream takes a context without a user as nobody in particular.
            "" => RawUser::default(),
            name => chosen("user", &file.users, name)?,
        };
        let directory = path.parent().unwrap_or(Path::new("/"));
        Ok(Kubeconfig {
            path: path.to_owned(),
            cluster: cluster
                .checked(directory)
                .map_err(|message| format!("cluster {:?}: {message}", context.cluster))?,
            user: user.checked(directory).map_err(|message| format!("user {:?}: {message}", context.user))?,
        })
    }

    /// Something it names is not as it should be.
    pub(crate) fn wrong(&self, message: String) -> KubeconfigError {
        KubeconfigError { path: self.path.clone(), message }
    }

    /// The same cluster, for a node that got a certificate: certificate and key are both in the file at `pem`.
    #[must_use]
    pub fn with_client_certificate(&self, pem: &Path) -> Self {
        let source = Source::File(pem.to_owned());
        let certificate = ClientCertificate { certificate: source.clone(), key: source };
        let user = User { certificate: Some(certificate), authorization: Authorization::None };
        Kubeconfig { user, ..self.clone() }
    }

    /// As upstream's bootstrap writes it, with the same names. Only a certificate in files is written, no other credential.
    pub fn to_yaml(&self) -> String {
        let mut cluster = Vec::new();
        match &self.cluster.certificate_authority {
            Some(Source::File(path)) => cluster.push(("certificate-authority", quoted_path(path))),
            Some(Source::Data(bytes)) => cluster.push(("certificate-authority-data", STANDARD.encode(bytes))),
            None => {}
        }
        if self.cluster.verification == Verification::Skipped {
            cluster.push(("insecure-skip-tls-verify", "true".to_owned()));
        }
        cluster.push(("server", quoted(self.cluster.server.to_string().trim_end_matches('/'))));
        if let Some(name) = &self.cluster.tls_server_name {
            cluster.push(("tls-server-name", quoted(name)));
        }
        let mut user = Vec::new();
        if let Some(ClientCertificate { certificate: Source::File(certificate), key: Source::File(key) }) =
            &self.user.certificate
        {
            user.push(("client-certificate", quoted_path(certificate)));
            user.push(("client-key", quoted_path(key)));
        }
        let context = [("cluster", "default-cluster"), ("namespace", "default"), ("user", "default-auth")]
            .map(|(key, value)| (key, value.to_owned()));
        format!(
            "apiVersion: v1\nclusters:\n- cluster:{}\n  name: default-cluster\ncontexts:\n- context:{}\n  name: default-context\n\
             current-context: default-context\nkind: Config\nusers:\n- name: default-auth\n  user:{}\n",
            mapping(&cluster),
            mapping(&context),
            mapping(&user),
        )
    }
}

fn mapping(entries: &[(&str, String)]) -> String {
    if entries.is_empty() {
        return " {}".to_owned();
    }
    entries.iter().map(|(key, value)| format!("\n    {key}: {value}")).collect()
}

/// A JSON string is a YAML string.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn quoted_path(path: &Path) -> String {
    quoted(&path.to_string_lossy())
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct File {
    #[serde(default)]
    current_context: String,
    #[serde(default)]
    contexts: Vec<Entry>,
    #[serde(default)]
    clusters: Vec<Entry>,
    #[serde(default)]
    users: Vec<Entry>,
}

/// Entries that are not chosen need not be good, so they stay unread.
#[derive(Deserialize)]
struct Entry {
    name: String,
    #[serde(default, alias = "context", alias = "cluster", alias = "user")]
    content: Value,
}

#[derive(Deserialize)]
struct Context {
    #[serde(default)]
    cluster: String,
    #[serde(default)]
    user: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", default)]
#[derive(Default)]
struct RawCluster {
    server: String,
    tls_server_name: String,
    insecure_skip_tls_verify: bool,
    certificate_authority: String,
    certificate_authority_data: String,
    proxy_url: String,
}

impl RawCluster {
    fn checked(self, directory: &Path) -> Result<Cluster, String> {
        if !self.proxy_url.is_empty() {
            return Err(
                "`proxy-url` is not supported: the API server must be reachable from the node itself".to_owned()
            );
        }
        let authority = ("certificate-authority", self.certificate_authority);
        let authority_data = ("certificate-authority-data", self.certificate_authority_data);
        let certificate_authority = source(authority, authority_data, directory)?;
        let verification = match (self.insecure_skip_tls_verify, &certificate_authority) {
            (false, _) => Verification::Required,
            (true, None) => Verification::Skipped,
            (true, Some(_)) => {
                let message = "`insecure-skip-tls-verify` and a certificate authority exclude each other: drop one";
                return Err(message.to_owned());
            }
        };
        Ok(Cluster {
            server: server(&self.server)?,
            certificate_authority,
            tls_server_name: Some(self.tls_server_name).filter(|name| !name.is_empty()),
            verification,
        })
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", default)]
#[derive(Default)]
struct RawUser {
    client_certificate: String,
    client_certificate_data: String,
    client_key: String,
    client_key_data: String,
    token: String,
    #[serde(rename = "tokenFile")]
    token_file: String,
    username: String,
    password: String,
    #[serde(rename = "as")]
    impersonated: String,
    auth_provider: Option<Value>,
}

impl RawUser {
    fn checked(self, directory: &Path) -> Result<User, String> {
        if !self.impersonated.is_empty() {
            return Err("`as` is not supported: a node acts as itself".to_owned());
        }
        if self.auth_provider.is_some() {
            return Err("`auth-provider` is no longer supported by Kubernetes: use `exec`".to_owned());
        }
        let data = ("client-certificate-data", self.client_certificate_data);
        let certificate = source(("client-certificate", self.client_certificate), data, directory)?;
        let key = source(("client-key", self.client_key), ("client-key-data", self.client_key_data), directory)?;
        let certificate = match (certificate, key) {
            (Some(certificate), Some(key)) => Some(ClientCertificate { certificate, key }),
            (None, None) => None,
            (Some(_), None) => return Err("a client certificate without `client-key` or `client-key-data`".to_owned()),
            (None, Some(_)) => {
                return Err("a client key without `client-certificate` or `client-certificate-data`".to_owned());
            }
        };
        let has_token = !self.token.is_empty() || !self.token_file.is_empty();
        let has_password = !self.username.is_empty() || !self.password.is_empty();
        let authorization = match (has_token, has_password) {
            (true, true) => return Err("a token and a password exclude each other: drop one".to_owned()),
            (true, false) if !self.token_file.is_empty() => Authorization::TokenFile(directory.join(self.token_file)),
            (true, false) => Authorization::Token(self.token),
            (false, true) => Authorization::Basic { username: self.username, password: self.password },
            (false, false) => Authorization::None,
        };
        Ok(User { certificate, authorization })
    }
}

/// A field and its value.
type Field = (&'static str, String);

fn source((file_field, file): Field, (data_field, data): Field, directory: &Path) -> Result<Option<Source>, String> {
    match (file.is_empty(), data.is_empty()) {
        (true, true) => Ok(None),
        (false, true) => Ok(Some(Source::File(directory.join(file)))),
        (false, false) => Err(format!("`{file_field}` and `{data_field}` exclude each other: drop one")),
        (true, false) => {
            let unfolded: String = data.split_whitespace().collect();
            let bytes = STANDARD.decode(unfolded).map_err(|error| format!("`{data_field}` is not base64: {error}"))?;
            Ok(Some(Source::Data(bytes)))
        }
    }
}

/// Without a scheme upstream takes a host for `https` if there is anything to verify it with; we ask for the scheme.
fn server(text: &str) -> Result<Uri, String> {
    if text.is_empty() {
        return Err("`server` is empty: give the API server's URL, such as https://10.0.0.1:6443".to_owned());
    }
    let uri: Uri = text.parse().map_err(|error| format!("`server` {text:?} is not a URL: {error}"))?;
    if !matches!(uri.scheme_str(), Some("https" | "http")) {
        return Err(format!("`server` {text:?} must begin with https:// or http://"));
    }
    match uri.authority() {
        Some(authority) if authority.as_str().contains('@') => {
            Err("`server` has credentials in it: give them in `users`".to_owned())
        }
        Some(authority) if !authority.host().is_empty() => Ok(uri),
        _ => Err(format!("`server` {text:?} names no host")),
    }
}

fn chosen<T: DeserializeOwned>(word: &str, entries: &[Entry], name: &str) -> Result<T, String> {
    let Some(entry) = entries.iter().find(|entry| entry.name == name) else {
        let known: Vec<_> = entries.iter().map(|entry| entry.name.as_str()).collect();
        return Err(format!("no {word} is named {name:?}; `{word}s` has {known:?}"));
    };
    // The library's message would show the value, which may be a secret.
    serde_json::from_value(entry.content.clone())
        .map_err(|_| format!("{word} {name:?}: a field has the wrong type; quote text that looks like a number"))
}

fn yaml(text: &[u8]) -> Result<Value, String> {
    let options = serde_saphyr::options! {
        with_snippet: false,
        // No kubeconfig repeats itself so much; a few lines of aliases can stand for gigabytes.
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: 10_000 },
    };
    let mut reader = text;
    match serde_saphyr::read_with_options::<_, Value>(&mut reader, options).next() {
        Some(Ok(value)) => Ok(value),
        Some(Err(error)) => Err(format!("not YAML: {error}")),
        None => Err("it is empty".to_owned()),
    }
}
