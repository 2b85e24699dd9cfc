//! The kubeconfig file: the API server's address and the client's credentials.
//!
//! Owns: which fields are read, how they combine, and the error texts.
//! Never: connects; reads the files a kubeconfig names (it only resolves their paths).
//! Upstream: `client-go/tools/clientcmd`.

use std::{
    borrow::Cow,
    fmt, io,
    path::{Path, PathBuf},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::Uri;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

use crate::client::{CredentialsError, ServerNameError};

/// The cluster and the user of the current context.
#[derive(Clone, Debug)]
pub struct Kubeconfig {
    /// Its path, for messages.
    pub path: PathBuf,
    pub cluster: Cluster,
    pub user: User,
}

#[derive(Clone, Debug)]
pub struct Cluster {
    pub server: Uri,
    /// Without one the node's trusted CAs are used.
    pub certificate_authority: Option<Source>,
    /// The name the server's certificate must have, if it differs from the server's host.
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

#[derive(Clone, Debug, PartialEq, Eq)]
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
    Basic {
        username: String,
        password: String,
    },
    /// An exec plugin returns a token or a certificate.
    Exec(Box<ExecPlugin>),
}

/// Names the kind of credential, never the secret.
impl fmt::Debug for Authorization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Authorization::None => f.write_str("None"),
            Authorization::Token(_) => f.write_str("Token"),
            Authorization::TokenFile(path) => f.debug_tuple("TokenFile").field(path).finish(),
            Authorization::Basic { username, .. } => f.debug_tuple("Basic").field(username).finish(),
            Authorization::Exec(plugin) => f.debug_tuple("Exec").field(&plugin.command).finish(),
        }
    }
}

#[derive(Clone)]
pub struct ExecPlugin {
    pub command: PathBuf,
    pub args: Vec<String>,
    pub env: Vec<(String, String)>,
    /// `client.authentication.k8s.io/v1` or `/v1beta1`.
    pub api_version: String,
    /// Shown if the command does not exist.
    pub install_hint: String,
    pub is_told_the_cluster: bool,
}

/// Arguments and environment may hold secrets.
impl fmt::Debug for ExecPlugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExecPlugin").field("command", &self.command).finish_non_exhaustive()
    }
}

/// PEM data, in a file or inline.
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

#[derive(Debug, thiserror::Error)]
#[error("kubeconfig {}", path.display())]
pub struct KubeconfigError {
    path: PathBuf,
    source: Box<KubeconfigProblem>,
}

/// What is wrong with a kubeconfig, or with a file it names.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KubeconfigProblem {
    #[error(transparent)]
    Read(#[from] io::Error),
    #[error("is {0} bytes long, at most {MAX_BYTES} are read")]
    TooLong(u64),
    #[error("it is empty")]
    Empty,
    #[error("not YAML")]
    Yaml(#[source] Box<serde_saphyr::Error>),
    #[error(transparent)]
    Type(#[from] serde_json::Error),
    /// Names the field and what to do.
    #[error("{0}")]
    Field(Cow<'static, str>),
    #[error("`{field}` is not base64")]
    Base64 { field: &'static str, source: base64::DecodeError },
    #[error("`server` {text:?} is not a URL")]
    Url { text: String, source: http::uri::InvalidUri },
    #[error("{kind} {name:?}")]
    Entry { kind: &'static str, name: String, source: Box<KubeconfigProblem> },
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    #[error(transparent)]
    ServerName(#[from] ServerNameError),
}

impl KubeconfigProblem {
    fn of_entry(self, kind: &'static str, name: &str) -> Self {
        KubeconfigProblem::Entry { kind, name: name.to_owned(), source: Box::new(self) }
    }
}

impl From<&'static str> for KubeconfigProblem {
    fn from(text: &'static str) -> Self {
        KubeconfigProblem::Field(Cow::Borrowed(text))
    }
}

impl From<String> for KubeconfigProblem {
    fn from(text: String) -> Self {
        KubeconfigProblem::Field(Cow::Owned(text))
    }
}

/// Inline certificates and keys make a kubeconfig a few KiB long.
const MAX_BYTES: u64 = 1 << 20;
const WRONG_TYPE: &str = "a field has the wrong type; quote text that looks like a number";

impl Kubeconfig {
    pub fn read(path: &Path) -> Result<Self, KubeconfigError> {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let read = read_bounded(&path).and_then(|text| Self::parse(&text, &path));
        read.map_err(|source| KubeconfigError { path, source: Box::new(source) })
    }

    /// `path` is the path of the text: files it names are relative to it.
    pub(crate) fn parse(text: &[u8], path: &Path) -> Result<Self, KubeconfigProblem> {
        let file: File = serde_json::from_value(yaml(text)?)?;
        if file.current_context.is_empty() {
            return Err("`current-context` is empty: name one of `contexts`".into());
        }
        let context: Context = chosen("context", &file.contexts, &file.current_context)?;
        let cluster: RawCluster = chosen("cluster", &file.clusters, &context.cluster)?;
        let user = match context.user.as_str() {
            // Upstream treats a context without a user as anonymous.
            "" => RawUser::default(),
            name => chosen("user", &file.users, name)?,
        };
        let directory = path.parent().unwrap_or(Path::new("/"));
        Ok(Kubeconfig {
            path: path.to_owned(),
            cluster: cluster.checked(directory).map_err(|problem| problem.of_entry("cluster", &context.cluster))?,
            user: user.checked(directory).map_err(|problem| problem.of_entry("user", &context.user))?,
        })
    }

    /// One of its references is invalid.
    pub(crate) fn wrong(&self, problem: impl Into<KubeconfigProblem>) -> KubeconfigError {
        KubeconfigError { path: self.path.clone(), source: Box::new(problem.into()) }
    }

    /// The same cluster with a new client certificate: certificate and key are both in the file at `pem`.
    #[must_use]
    pub fn with_client_certificate(&self, pem: &Path) -> Self {
        let source = Source::File(pem.to_owned());
        let certificate = ClientCertificate { certificate: source.clone(), key: source };
        let user = User { certificate: Some(certificate), authorization: Authorization::None };
        Kubeconfig { user, ..self.clone() }
    }

    /// In upstream's bootstrap format, with the same names. Only a certificate in files is written, no other credential.
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

fn read_bounded(path: &Path) -> Result<Vec<u8>, KubeconfigProblem> {
    let length = std::fs::metadata(path)?.len();
    if length > MAX_BYTES {
        return Err(KubeconfigProblem::TooLong(length));
    }
    Ok(std::fs::read(path)?)
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

/// Entries that are not selected need not be valid, so they are not decoded.
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
    fn checked(self, directory: &Path) -> Result<Cluster, KubeconfigProblem> {
        if !self.proxy_url.is_empty() {
            return Err("`proxy-url` is not supported: the API server must be reachable from the node itself".into());
        }
        let authority = ("certificate-authority", self.certificate_authority);
        let authority_data = ("certificate-authority-data", self.certificate_authority_data);
        let certificate_authority = source(authority, authority_data, directory)?;
        let verification = match (self.insecure_skip_tls_verify, &certificate_authority) {
            (false, _) => Verification::Required,
            (true, None) => Verification::Skipped,
            (true, Some(_)) => {
                let message = "`insecure-skip-tls-verify` and a certificate authority exclude each other: drop one";
                return Err(message.into());
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
    exec: Option<RawExec>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RawExec {
    command: String,
    /// Upstream writes lists without entries as null.
    args: Option<Vec<String>>,
    env: Option<Vec<RawVariable>>,
    api_version: String,
    install_hint: String,
    provide_cluster_info: bool,
    interactive_mode: String,
}

#[derive(Deserialize)]
struct RawVariable {
    name: String,
    value: String,
}

impl RawUser {
    fn checked(self, directory: &Path) -> Result<User, KubeconfigProblem> {
        if !self.impersonated.is_empty() {
            return Err("`as` is not supported: a node acts as itself".into());
        }
        if self.auth_provider.is_some() {
            return Err("`auth-provider` is no longer supported by Kubernetes: use `exec`".into());
        }
        let data = ("client-certificate-data", self.client_certificate_data);
        let certificate = source(("client-certificate", self.client_certificate), data, directory)?;
        let key = source(("client-key", self.client_key), ("client-key-data", self.client_key_data), directory)?;
        let certificate = match (certificate, key) {
            (Some(certificate), Some(key)) => Some(ClientCertificate { certificate, key }),
            (None, None) => None,
            (Some(_), None) => return Err("a client certificate without `client-key` or `client-key-data`".into()),
            (None, Some(_)) => {
                return Err("a client key without `client-certificate` or `client-certificate-data`".into());
            }
        };
        let token_file = (!self.token_file.is_empty())
            .then(|| ("tokenFile", Authorization::TokenFile(directory.join(self.token_file))));
        // Upstream: a token file overrides a token.
        let token =
            (!self.token.is_empty() && token_file.is_none()).then_some(("token", Authorization::Token(self.token)));
        let has_password = !self.username.is_empty() || !self.password.is_empty();
        let (username, password) = (self.username, self.password);
        let basic = has_password.then_some(("username", Authorization::Basic { username, password }));
        let exec = self.exec.map(|exec| exec.checked(directory)).transpose()?;
        let exec = exec.map(|plugin| ("exec", Authorization::Exec(Box::new(plugin))));
        let mut given = [token_file, token, basic, exec].into_iter().flatten();
        let authorization = match (given.next(), given.next()) {
            (None, _) => Authorization::None,
            (Some((_, authorization)), None) => authorization,
            (Some((one, _)), Some((other, _))) => {
                return Err(format!("`{one}` and `{other}` exclude each other: drop one").into());
            }
        };
        Ok(User { certificate, authorization })
    }
}

impl RawExec {
    fn checked(self, directory: &Path) -> Result<ExecPlugin, KubeconfigProblem> {
        if self.command.is_empty() {
            return Err("`exec.command` is empty: name the program that has the credentials".into());
        }
        let version = self.api_version.as_str();
        let is_beta = version == "client.authentication.k8s.io/v1beta1";
        if !is_beta && version != "client.authentication.k8s.io/v1" {
            let known = "client.authentication.k8s.io/v1 or client.authentication.k8s.io/v1beta1";
            return Err(format!("`exec.apiVersion` is {version:?}, must be {known}").into());
        }
        match self.interactive_mode.as_str() {
            "Never" | "IfAvailable" => {}
            "" if is_beta => {}
            "Always" => return Err("`exec.interactiveMode` is Always: a node has nobody to ask".into()),
            other => return Err(format!("`exec.interactiveMode` is {other:?}, must be Never or IfAvailable").into()),
        }
        // Only a path is relative to the kubeconfig; a name is searched in PATH.
        let is_path = self.command.contains('/');
        let variables = self.env.unwrap_or_default().into_iter();
        Ok(ExecPlugin {
            command: if is_path { directory.join(self.command) } else { PathBuf::from(self.command) },
            args: self.args.unwrap_or_default(),
            env: variables.map(|variable| (variable.name, variable.value)).collect(),
            api_version: self.api_version,
            install_hint: self.install_hint,
            is_told_the_cluster: self.provide_cluster_info,
        })
    }
}

/// A field and its value.
type Field = (&'static str, String);

fn source(
    (file_field, file): Field,
    (data_field, data): Field,
    directory: &Path,
) -> Result<Option<Source>, KubeconfigProblem> {
    match (file.is_empty(), data.is_empty()) {
        (true, true) => Ok(None),
        (false, true) => Ok(Some(Source::File(directory.join(file)))),
        (false, false) => Err(format!("`{file_field}` and `{data_field}` exclude each other: drop one").into()),
        (true, false) => {
            let unfolded: String = data.split_whitespace().collect();
            let bytes =
                STANDARD.decode(unfolded).map_err(|source| KubeconfigProblem::Base64 { field: data_field, source })?;
            Ok(Some(Source::Data(bytes)))
        }
    }
}

/// Without a scheme upstream uses `https` if there is anything to verify it with; we require the scheme.
fn server(text: &str) -> Result<Uri, KubeconfigProblem> {
    if text.is_empty() {
        return Err("`server` is empty: give the API server's URL, such as https://10.0.0.1:6443".into());
    }
    let uri: Uri = text.parse().map_err(|source| KubeconfigProblem::Url { text: text.to_owned(), source })?;
    if !matches!(uri.scheme_str(), Some("https" | "http")) {
        return Err(format!("`server` {text:?} must begin with https:// or http://").into());
    }
    match uri.authority() {
        Some(authority) if authority.as_str().contains('@') => {
            Err("`server` has credentials in it: give them in `users`".into())
        }
        Some(authority) if !authority.host().is_empty() => Ok(uri),
        _ => Err(format!("`server` {text:?} names no host").into()),
    }
}

fn chosen<T: DeserializeOwned>(word: &'static str, entries: &[Entry], name: &str) -> Result<T, KubeconfigProblem> {
    let Some(entry) = entries.iter().find(|entry| entry.name == name) else {
        let known: Vec<_> = entries.iter().map(|entry| entry.name.as_str()).collect();
        return Err(format!("no {word} is named {name:?}; `{word}s` has {known:?}").into());
    };
    // The library's message would show the value, which may be a secret.
    serde_json::from_value(entry.content.clone()).map_err(|_| KubeconfigProblem::from(WRONG_TYPE).of_entry(word, name))
}

fn yaml(text: &[u8]) -> Result<Value, KubeconfigProblem> {
    let options = serde_saphyr::options! {
        with_snippet: false,
        // Limits aliases: a few lines of them can expand to gigabytes.
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: 10_000 },
    };
    let mut reader = text;
    match serde_saphyr::read_with_options::<_, Value>(&mut reader, options).next() {
        Some(Ok(value)) => Ok(value),
        Some(Err(error)) => Err(KubeconfigProblem::Yaml(Box::new(error))),
        None => Err(KubeconfigProblem::Empty),
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;
    use crate::error_chain;

    fn parsed(text: &str) -> Result<Kubeconfig, KubeconfigProblem> {
        Kubeconfig::parse(text.as_bytes(), Path::new("/etc/kubernetes/kubelet.conf"))
    }

    /// A kubeconfig with these entries.
    fn with(cluster: &str, user: &str) -> Result<Kubeconfig, KubeconfigProblem> {
        parsed(&format!(
            "current-context: x\ncontexts: [{{name: x, context: {{cluster: c, user: u}}}}]\n\
             clusters: [{{name: other, cluster: 5}}, {{name: c, cluster: {cluster}}}]\nusers: [{{name: u, user: {user}}}]\n"
        ))
    }

    const SERVER: &str = "{server: 'https://10.0.0.1:6443'}";

    #[test]
    fn files_are_found_beside_the_kubeconfig_and_data_in_it() {
        let found = with(
            "{server: 'https://h/prefix', certificate-authority: ca.crt, tls-server-name: name}",
            "{client-certificate-data: Zm9v, client-key: /abs/key, tokenFile: token}",
        )
        .unwrap();
        let authority = Source::File(PathBuf::from("/etc/kubernetes/ca.crt"));
        assert_eq!(found.cluster.certificate_authority, Some(authority));
        assert_eq!(found.cluster.tls_server_name.as_deref(), Some("name"));
        let certificate = Source::Data(b"foo".to_vec());
        let key = Source::File(PathBuf::from("/abs/key"));
        assert_eq!(found.user.certificate, Some(ClientCertificate { certificate, key }));
        let Authorization::TokenFile(path) = found.user.authorization else { panic!("{:?}", found.user) };
        assert_eq!(path, Path::new("/etc/kubernetes/token"));
    }

    #[test]
    fn user_without_credentials_has_none() {
        let found = with(SERVER, "{}").unwrap();
        assert_eq!(found.user.certificate, None);
        assert!(matches!(found.user.authorization, Authorization::None), "{:?}", found.user);
    }

    #[test]
    fn kubeconfig_errors_name_entry_and_field() {
        let contexts = "contexts: [{name: x, context: {cluster: c, user: u}}]";
        let found = [
            parsed(""),
            parsed("a: [1"),
            parsed("current-context: ''"),
            parsed("current-context: away\ncontexts: [{name: x}, {name: z}]"),
            parsed(&format!("current-context: x\n{contexts}\nclusters: []")),
            with("{}", "{}"),
            with("{server: '10.0.0.1:6443'}", "{}"),
            with("{server: 'https://u:p@h'}", "{}"),
            with("{server: 'https://h', proxy-url: 'http://proxy'}", "{}"),
            with("{server: 'https://h', certificate-authority-data: '*'}", "{}"),
            with("{server: 'https://h', certificate-authority: a, certificate-authority-data: Zm9v}", "{}"),
            with("{server: 'https://h', certificate-authority: a, insecure-skip-tls-verify: true}", "{}"),
            with(SERVER, "{client-certificate: a}"),
            with(SERVER, "{client-key: a}"),
            with(SERVER, "{token: 123456}"),
            with(SERVER, "{token: t, username: u, password: p}"),
            with(SERVER, "{as: somebody}"),
            with(SERVER, "{exec: {apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never}}"),
            with(SERVER, "{exec: {command: c, apiVersion: v2, interactiveMode: Never}}"),
            with(SERVER, "{exec: {command: c, apiVersion: client.authentication.k8s.io/v1}}"),
        ]
        .map(|found| error_chain(&found.unwrap_err()))
        .join("\n");
        assert_snapshot!(found, @r#"
        it is empty
        not YAML: unclosed bracket '[' at line 1, column 4
        `current-context` is empty: name one of `contexts`
        no context is named "away"; `contexts` has ["x", "z"]
        no cluster is named "c"; `clusters` has []
        cluster "c": `server` is empty: give the API server's URL, such as https://10.0.0.1:6443
        cluster "c": `server` "10.0.0.1:6443" must begin with https:// or http://
        cluster "c": `server` has credentials in it: give them in `users`
        cluster "c": `proxy-url` is not supported: the API server must be reachable from the node itself
        cluster "c": `certificate-authority-data` is not base64: Invalid symbol 42, offset 0.
        cluster "c": `certificate-authority` and `certificate-authority-data` exclude each other: drop one
        cluster "c": `insecure-skip-tls-verify` and a certificate authority exclude each other: drop one
        user "u": a client certificate without `client-key` or `client-key-data`
        user "u": a client key without `client-certificate` or `client-certificate-data`
        user "u": a field has the wrong type; quote text that looks like a number
        user "u": `token` and `username` exclude each other: drop one
        user "u": `as` is not supported: a node acts as itself
        user "u": `exec.command` is empty: name the program that has the credentials
        user "u": `exec.apiVersion` is "v2", must be client.authentication.k8s.io/v1 or client.authentication.k8s.io/v1beta1
        user "u": `exec.interactiveMode` is "", must be Never or IfAvailable
        "#);
    }

    #[test]
    fn exec_plugin_is_found_in_path_or_beside_kubeconfig() {
        for (command, expected) in [("get-token", "get-token"), ("./get-token", "/etc/kubernetes/./get-token")] {
            let user = format!(
                "{{exec: {{command: {command}, apiVersion: client.authentication.k8s.io/v1beta1, args: null, \
                 env: [{{name: A, value: b}}]}}}}"
            );
            let Authorization::Exec(plugin) = with(SERVER, &user).unwrap().user.authorization else { panic!("{user}") };
            assert_eq!(plugin.command, Path::new(expected));
            assert_eq!(plugin.env, [("A".to_owned(), "b".to_owned())]);
        }
    }

    #[test]
    fn bootstrapped_kubeconfig_equals_upstreams() {
        let bootstrap = with("{server: 'https://10.0.0.1:6443', certificate-authority-data: Zm9v}", "{token: secret}");
        let written =
            bootstrap.unwrap().with_client_certificate(Path::new("/pki/kubelet-client-current.pem")).to_yaml();
        assert_snapshot!(written, @r#"
        apiVersion: v1
        clusters:
        - cluster:
            certificate-authority-data: Zm9v
            server: "https://10.0.0.1:6443"
          name: default-cluster
        contexts:
        - context:
            cluster: default-cluster
            namespace: default
            user: default-auth
          name: default-context
        current-context: default-context
        kind: Config
        users:
        - name: default-auth
          user:
            client-certificate: "/pki/kubelet-client-current.pem"
            client-key: "/pki/kubelet-client-current.pem"
        "#);
        let read = parsed(&written).unwrap();
        assert_eq!(read.to_yaml(), written);
        assert_eq!(read.user.certificate.unwrap().key, Source::File(PathBuf::from("/pki/kubelet-client-current.pem")));
    }

    #[test]
    fn no_secret_is_shown() {
        let users = [
            "{token: secret}",
            "{username: me, password: secret}",
            "{client-certificate-data: c2VjcmV0, client-key-data: c2VjcmV0}",
            "{exec: {command: c, args: [secret], apiVersion: client.authentication.k8s.io/v1beta1}}",
        ];
        for user in users {
            let shown = format!("{:?}", with(SERVER, user).unwrap());
            assert!(!shown.contains("secret") && !shown.contains("115, 101"), "{shown}");
        }
    }
}
