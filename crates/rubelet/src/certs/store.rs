//! Stores a certificate and its key: one file per pair, and a link to the one in use.
//!
//! Owns: `<prefix>-<date>.pem`, `<prefix>-current.pem`, their modes, and the order of writes: a reader of the link sees the
//! complete old pair or the complete new one.
//! Upstream: `client-go/util/certificate/certificate_store.go`, which removes the link before it creates the new one.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use jiff::Timestamp;
use rubelet_host::port::{FileKind, Host, ReadError};
use rubelet_tls::MAX_PEM_BYTES;

use super::leaf::{Leaf, LeafError};

#[derive(Clone)]
pub(super) struct Store {
    host: Arc<dyn Host>,
    dir: PathBuf,
    prefix: &'static str,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("dir", &self.dir).field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{}", path.display())]
pub(super) struct StoreError {
    path: PathBuf,
    source: StoreProblem,
}

#[derive(Debug, thiserror::Error)]
enum StoreProblem {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error(transparent)]
    Pair(#[from] LeafError),
    #[error("is not a link to a pair and will not be replaced: move it away")]
    NotALink,
}

impl Store {
    /// `dir` is absolute: links point at what is in it.
    pub(super) fn new(host: Arc<dyn Host>, dir: &Path, prefix: &'static str) -> Self {
        Store { host, dir: dir.to_owned(), prefix }
    }

    pub(super) fn current_path(&self) -> PathBuf {
        current_path(&self.dir, self.prefix)
    }

    /// The certificate of the pair in use; `None` if there is none yet.
    pub(super) async fn current(&self) -> Result<Option<Leaf>, StoreError> {
        self.finish_change().await?;
        let path = self.current_path();
        let read = self.host.read_file(&path, MAX_PEM_BYTES).await;
        match read {
            Ok(pem) => Leaf::of_pair(&pem).map(Some).map_err(wrong(&path)),
            Err(ReadError::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(wrong(&path)(error)),
        }
    }

    /// Stores a new pair and puts it to use.
    pub(super) async fn update(&self, certificates: &str, key: &str, now: Timestamp) -> Result<Leaf, StoreError> {
        let date = now.strftime("%Y-%m-%d-%H-%M-%S").to_string();
        let path = self.path(&date);
        let pair = format!("{}\n{}", certificates.trim_end(), key);
        let leaf = Leaf::of_pair(pair.as_bytes()).map_err(wrong(&path))?;
        make_missing_dir(self.host.as_ref(), &self.dir).await.map_err(wrong(&self.dir))?;
        self.may_be_replaced(&self.current_path()).await?;
        // After a power cut the link must not point to a pair that was never written.
        self.host.write_durably(&path, pair.as_bytes(), 0o600).await.map_err(wrong(&path))?;
        self.host.make_link(&path, &self.current_path()).await.map_err(wrong(&self.current_path()))?;
        self.host.sync_dir(&self.dir).await.map_err(wrong(&self.dir))?;
        Ok(leaf)
    }

    /// Upstream's agent may have died between removing the old link and creating the new one.
    async fn finish_change(&self) -> Result<(), StoreError> {
        let (current, updated) = (self.current_path(), self.path("updated"));
        if self.host.file_kind(&current).await.map_err(wrong(&current))?.is_some() {
            return Ok(());
        }
        let Some(target) = self.host.read_link(&updated).await.map_err(wrong(&updated))? else { return Ok(()) };
        self.host.make_link(&target, &current).await.map_err(wrong(&current))?;
        self.host.remove_file(&updated).await.map_err(wrong(&updated))
    }

    async fn may_be_replaced(&self, link: &Path) -> Result<(), StoreError> {
        let target = self.host.read_link(link).await.map_err(wrong(link))?;
        let kind = self.host.file_kind(link).await.map_err(wrong(link))?;
        if target.is_none() && kind.is_some() {
            return Err(wrong(link)(StoreProblem::NotALink));
        }
        Ok(())
    }

    fn path(&self, qualifier: &str) -> PathBuf {
        self.dir.join(format!("{}-{qualifier}.pem", self.prefix))
    }
}

/// The link to the pair in use.
pub(super) fn current_path(dir: &Path, prefix: &str) -> PathBuf {
    dir.join(format!("{prefix}-current.pem"))
}

/// Upstream's mode for a new directory; an existing one keeps its mode.
pub(super) async fn make_missing_dir(host: &dyn Host, dir: &Path) -> io::Result<()> {
    match host.file_kind(dir).await? {
        Some(FileKind::Directory) => Ok(()),
        _ => host.make_dir(dir, 0o755).await,
    }
}

fn wrong<E: Into<StoreProblem>>(path: &Path) -> impl FnOnce(E) -> StoreError {
    let path = path.to_owned();
    move |error| StoreError { path, source: error.into() }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt as _, symlink},
    };

    use rcgen::KeyPair;
    use rubelet_host::linux::LinuxHost;
    use rubelet_kube::error_chain;

    use super::*;
    use crate::certs::{
        CertificateTemplate,
        test_authority::{Validity, authority, start},
    };

    #[tokio::test]
    async fn new_pair_is_written_to_new_file_and_link_updated() {
        let dir = tempfile::tempdir().unwrap();
        let pki = dir.path().join("pki");
        let store = store(&pki);
        assert_eq!(store.current().await.unwrap(), None);
        let first = update(&store, start()).await;
        let second = update(&store, start() + jiff::SignedDuration::from_secs(61)).await;
        assert_ne!(first, second);
        assert_eq!(store.current().await.unwrap(), Some(second));
        let mut names: Vec<_> = fs::read_dir(&pki).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        let expected = [
            "kubelet-client-2026-11-16-00-00-00.pem",
            "kubelet-client-2026-11-16-00-01-01.pem",
            "kubelet-client-current.pem",
        ];
        assert_eq!(names, expected);
        assert_eq!(fs::read_link(store.current_path()).unwrap(), pki.join(expected[1]));
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&pki), mode(&store.current_path())), (0o755, 0o600));
    }

    #[tokio::test]
    async fn a_change_that_upstream_was_cut_off_in_is_finished() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let leaf = update(&store, start()).await;
        let target = fs::read_link(store.current_path()).unwrap();
        fs::remove_file(store.current_path()).unwrap();
        symlink(target, store.path("updated")).unwrap();
        assert_eq!(store.current().await.unwrap(), Some(leaf));
        assert!(fs::symlink_metadata(store.path("updated")).is_err());
    }

    #[tokio::test]
    async fn a_file_in_the_links_place_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        fs::write(store.current_path(), "somebody's").unwrap();
        let key = KeyPair::generate().unwrap();
        let certificate = authority().certificate(&CertificateTemplate::client("n1"), &key, Validity::hours(1));
        let error = store.update(&certificate, &key.serialize_pem(), start()).await.unwrap_err();
        let error = error_chain(&error);
        assert!(error.contains("kubelet-client-current.pem: is not a link"), "{error}");
        assert_eq!(fs::read_to_string(store.current_path()).unwrap(), "somebody's");
    }

    #[tokio::test]
    async fn certificate_for_another_key_is_rejected_and_old_pair_kept() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let leaf = update(&store, start()).await;
        let (key, other) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
        let certificate = authority().certificate(&CertificateTemplate::client("n1"), &key, Validity::hours(1));
        store.update(&certificate, &other.serialize_pem(), start()).await.unwrap_err();
        assert_eq!(store.current().await.unwrap(), Some(leaf));
    }

    fn store(dir: &Path) -> Store {
        Store::new(Arc::new(LinuxHost::default()), dir, "kubelet-client")
    }

    async fn update(store: &Store, now: Timestamp) -> Leaf {
        let key = KeyPair::generate().unwrap();
        let validity = Validity::secs_from(now, 3600);
        let certificate = authority().certificate(&CertificateTemplate::client("n1"), &key, validity);
        store.update(&certificate, &key.serialize_pem(), now).await.unwrap()
    }
}
