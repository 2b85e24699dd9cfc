//! The client's credentials, reloaded when their source changes.
//!
//! Owns: when certificates and tokens are reloaded or requested again, and what is used meanwhile.
//! Upstream: `client-go/transport` (cert_rotation.go, token_source.go), the cache of its exec plugin.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::HeaderValue;
use rubelet_tls::Stamp;
use rustls::ClientConfig;
use tokio::{
    sync::Semaphore,
    task::JoinError,
    time::{Instant, timeout},
};

use crate::{
    client::{
        error_chain,
        exec::{self, ExecError, Issued},
        tls::{self, TlsError},
    },
    clock,
    kubeconfig::{Authorization, ClientCertificate, Cluster, ExecPlugin, Kubeconfig, Source},
};

/// Minimum time between checks of files, unless a reload is requested.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Upstream's period for a token file.
const READ_TOKEN_EVERY: Duration = Duration::from_secs(60);
/// Tokens are a few KiB; a header must not be much longer.
const MAX_TOKEN_BYTES: u64 = 64 << 10;
/// A new token of a plugin is not requested again, however many requests were rejected together.
const ASK_EVERY: Duration = Duration::from_secs(5);

/// A disk that does not answer holds up no request for longer: the credentials as last read are used.
const READ_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct Credentials {
    cluster: Cluster,
    certificate: Option<ClientCertificate>,
    authorization: Authorization,
    state: Mutex<State>,
    /// One request runs the plugin, the others wait for its result.
    asking: Semaphore,
    /// One thread reads files: on a disk that does not answer, none is added.
    reading: Arc<Semaphore>,
}

#[derive(Debug)]
struct State {
    /// `None` for plain HTTP.
    tls: Option<Arc<ClientConfig>>,
    generation: u64,
    stamps: Vec<Stamp>,
    looked_at: Instant,
    /// The content of a file, and when it was read.
    token: Option<(HeaderValue, Instant)>,
    issued: Option<FromProgram>,
}

#[derive(Clone, Debug)]
struct FromProgram {
    token: Option<HeaderValue>,
    certificate: Option<ClientCertificate>,
    expires: Option<jiff::Timestamp>,
    asked_at: Instant,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum CredentialsError {
    #[error("tokenFile {}", path.display())]
    TokenFile { path: PathBuf, source: io::Error },
    #[error("tokenFile {} is too long to be a token", .0.display())]
    LongToken(PathBuf),
    #[error("tokenFile {} is empty", .0.display())]
    EmptyToken(PathBuf),
    #[error("the token has characters no header may have")]
    NotAHeader,
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(transparent)]
    Exec(#[from] ExecError),
    #[error("their disk has not answered for {} s", READ_TIMEOUT.as_secs())]
    Late,
    #[error(transparent)]
    Task(#[from] JoinError),
}

/// Whether files and tokens are read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reload {
    /// If the last read is more than a few seconds old.
    IfStale,
    Now,
}

impl Credentials {
    /// Reads all files, so that errors are found at start.
    pub(super) fn load(kubeconfig: &Kubeconfig) -> Result<Self, CredentialsError> {
        let certificate = kubeconfig.user.certificate.clone();
        let cluster = kubeconfig.cluster.clone();
        let files = files(&cluster, certificate.as_ref());
        let stamps = stamps(&files);
        let tls = match cluster.server.scheme_str() {
            Some("https") => Some(Arc::new(tls::config(&cluster, certificate.as_ref())?)),
            _ => None,
        };
        let authorization = kubeconfig.user.authorization.clone();
        if let Authorization::TokenFile(path) = &authorization {
            read_token(path)?;
        }
        let state =
            Mutex::new(State { tls, generation: 0, stamps, looked_at: clock::now(), token: None, issued: None });
        Ok(Credentials {
            cluster,
            certificate,
            authorization,
            state,
            asking: Semaphore::new(1),
            reading: Arc::new(Semaphore::new(1)),
        })
    }

    /// The configuration for a new connection, and its generation: connections of an earlier one are outdated.
    pub(super) async fn tls(&self, reload: Reload) -> (Option<Arc<ClientConfig>>, u64) {
        if let Some(known) = self.is_time_to_look(reload) {
            self.look(known).await;
        }
        let state = self.state();
        (state.tls.clone(), state.generation)
    }

    pub(super) async fn authorization(&self, reload: Reload) -> Result<Option<HeaderValue>, CredentialsError> {
        match &self.authorization {
            Authorization::None => Ok(None),
            Authorization::Token(token) => secret_header(&format!("Bearer {token}")).map(Some),
            Authorization::Basic { username, password } => {
                secret_header(&format!("Basic {}", STANDARD.encode(format!("{username}:{password}")))).map(Some)
            }
            Authorization::TokenFile(path) => self.token_of_file(path, reload).await.map(Some),
            Authorization::Exec(plugin) => self.token_of_program(plugin, reload).await,
        }
    }

    /// Whether another request may give another result.
    pub(super) fn can_be_refreshed(&self) -> bool {
        match self.authorization {
            Authorization::None | Authorization::Token(_) | Authorization::Basic { .. } => false,
            Authorization::TokenFile(_) | Authorization::Exec(_) => true,
        }
    }

    /// The known stamps, if the files are due for a check. One caller checks; the others continue.
    fn is_time_to_look(&self, reload: Reload) -> Option<Vec<Stamp>> {
        let mut state = self.state();
        let is_due = reload == Reload::Now || state.looked_at.elapsed() >= LOOK_EVERY;
        if !is_due || state.tls.is_none() || state.stamps.is_empty() {
            return None;
        }
        state.looked_at = clock::now();
        Some(state.stamps.clone())
    }

    async fn look(&self, known: Vec<Stamp>) {
        let issued = self.state().issued.as_ref().and_then(|issued| issued.certificate.clone());
        let (cluster, certificate) = (self.cluster.clone(), issued.or_else(|| self.certificate.clone()));
        let read = self.read(move || {
            let found = stamps(&files(&cluster, certificate.as_ref()));
            (found != known).then(|| (found, tls::config(&cluster, certificate.as_ref())))
        });
        match read.await {
            Ok(Some((stamps, Ok(config)))) => {
                let mut state = self.state();
                state.tls = Some(Arc::new(config));
                state.stamps = stamps;
                state.generation += 1;
                tracing::info!("the client certificate or its authority changed: new connections use it");
            }
            // Perhaps half written. The stamps stay, so the next check reads it again.
            Ok(Some((_, Err(error)))) => tracing::warn!("keeping the old client certificate: {}", error_chain(&error)),
            Ok(None) => {}
            Err(error) => tracing::warn!("cannot look at the client certificate: {}", error_chain(&error)),
        }
    }

    async fn read<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, CredentialsError> {
        let read = timeout(READ_TIMEOUT, async {
            let turn = self.reading.clone().acquire_owned().await;
            let on_thread = move || {
                let _held_to_the_end = turn;
                work()
            };
            tokio::task::spawn_blocking(on_thread).await
        });
        Ok(read.await.map_err(|_elapsed| CredentialsError::Late)??)
    }

    async fn token_of_file(&self, path: &Path, reload: Reload) -> Result<HeaderValue, CredentialsError> {
        let known = self.state().token.clone();
        if let (Reload::IfStale, Some((token, read_at))) = (reload, &known)
            && read_at.elapsed() < READ_TOKEN_EVERY
        {
            return Ok(token.clone());
        }
        let path = path.to_owned();
        let read = self.read(move || read_token(&path)).await;
        match (read.unwrap_or_else(Err), known) {
            (Ok(token), _) => {
                self.state().token = Some((token.clone(), clock::now()));
                Ok(token)
            }
            (Err(error), Some((token, _))) => {
                tracing::warn!("going on with the token as last read: {}", error_chain(&error));
                Ok(token)
            }
            (Err(error), None) => Err(error),
        }
    }

    /// `None` if the plugin returned a certificate instead, which `tls` then has.
    async fn token_of_program(
        &self,
        plugin: &ExecPlugin,
        reload: Reload,
    ) -> Result<Option<HeaderValue>, CredentialsError> {
        if let Some(issued) = self.still_good(reload) {
            return Ok(issued.token);
        }
        let _turn = self.asking.acquire().await.expect("the semaphore is never closed");
        if let Some(issued) = self.still_good(reload) {
            return Ok(issued.token);
        }
        let Issued { token, certificate, expires } = exec::run(plugin, &self.cluster).await?;
        let token = token.map(|token| secret_header(&format!("Bearer {token}"))).transpose()?;
        let known = self.state().issued.as_ref().and_then(|issued| issued.certificate.clone());
        let tls = match &certificate {
            Some(new) if known.as_ref() != Some(new) => Some(Arc::new(tls::config(&self.cluster, Some(new))?)),
            _ => None,
        };
        let mut state = self.state();
        if tls.is_some() && state.tls.is_some() {
            state.tls = tls;
            state.generation += 1;
        }
        state.issued = Some(FromProgram { token: token.clone(), certificate, expires, asked_at: clock::now() });
        Ok(token)
    }

    fn still_good(&self, reload: Reload) -> Option<FromProgram> {
        let issued = self.state().issued.clone()?;
        let is_alive = issued.expires.is_none_or(|expires| clock::wall() < expires);
        let is_wanted = reload == Reload::IfStale || issued.asked_at.elapsed() < ASK_EVERY;
        (is_alive && is_wanted).then_some(issued)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn files(cluster: &Cluster, certificate: Option<&ClientCertificate>) -> Vec<PathBuf> {
    let user = certificate.map(|certificate| [&certificate.certificate, &certificate.key]);
    let sources = cluster.certificate_authority.iter().chain(user.into_iter().flatten());
    sources
        .filter_map(|source| match source {
            Source::File(path) => Some(path.clone()),
            Source::Data(_) => None,
        })
        .collect()
}

fn stamps(files: &[PathBuf]) -> Vec<Stamp> {
    files.iter().map(|path| Stamp::of(path)).collect()
}

fn read_token(path: &Path) -> Result<HeaderValue, CredentialsError> {
    let unreadable = |source| CredentialsError::TokenFile { path: path.to_owned(), source };
    if std::fs::metadata(path).map_err(unreadable)?.len() > MAX_TOKEN_BYTES {
        return Err(CredentialsError::LongToken(path.to_owned()));
    }
    let text = std::fs::read_to_string(path).map_err(unreadable)?;
    let token = text.trim();
    if token.is_empty() {
        return Err(CredentialsError::EmptyToken(path.to_owned()));
    }
    secret_header(&format!("Bearer {token}"))
}

fn secret_header(text: &str) -> Result<HeaderValue, CredentialsError> {
    let mut value = HeaderValue::from_str(text).map_err(|_| CredentialsError::NotAHeader)?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use std::{fs, process::Command};

    use super::*;

    #[tokio::test]
    async fn token_as_last_read_is_used_while_its_disk_does_not_answer() {
        let dir = tempfile::tempdir().unwrap();
        let (token, config) = (dir.path().join("token"), dir.path().join("config"));
        fs::write(&token, "known").unwrap();
        let text = format!(
            "current-context: c\ncontexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
             clusters: [{{name: c, cluster: {{server: \"http://127.0.0.1:1\"}}}}]\n\
             users: [{{name: u, user: {{tokenFile: {:?}}}}}]\n",
            token.display().to_string()
        );
        fs::write(&config, text).unwrap();
        let credentials = Credentials::load(&Kubeconfig::read(&config).unwrap()).unwrap();
        let ask = || credentials.authorization(Reload::Now);
        assert_eq!(ask().await.unwrap().unwrap(), "Bearer known");
        // Opening a pipe without a writer does not return, as reading on a disk that hangs.
        fs::remove_file(&token).unwrap();
        assert!(Command::new("mkfifo").arg(&token).status().unwrap().success());
        for _ in 0..2 {
            assert_eq!(ask().await.unwrap().unwrap(), "Bearer known");
        }
        assert_eq!(credentials.reading.available_permits(), 0);
        fs::write(&token, "new").unwrap();
        let _turn = credentials.reading.acquire().await.unwrap();
    }
}
