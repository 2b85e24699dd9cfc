//! A registry of one image, on loopback.
//!
//! Owns: what a pull asks for: the manifest and its blobs, by plain HTTP. It ends with the program.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use rubelet_testbed::image::{self, Image, Layer, Start, digest};
use serde_json::json;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

pub struct Registry {
    /// The name of its image.
    pub image: String,
    asked: Arc<AtomicUsize>,
}

/// The content type and the bytes of each path.
type Pages = BTreeMap<String, (&'static str, Vec<u8>)>;

impl Registry {
    pub fn serve(name: &str, layer: &Layer) -> anyhow::Result<Self> {
        let pages = pages(name, layer)?;
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let image = format!("{}/{name}:1", listener.local_addr()?);
        let asked = Arc::new(AtomicUsize::new(0));
        let counter = asked.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // A client that disconnects tries again.
                let _ = answer(stream, &pages, &counter);
            }
        });
        Ok(Registry { image, asked })
    }

    /// How often its manifest was asked for.
    pub fn pulls(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

fn pages(name: &str, layer: &Layer) -> anyhow::Result<Pages> {
    let config = image::config(&Image { names: &[], start: Start::default(), layers: &[layer] })?;
    let content = layer.content()?;
    let blob = |kind: &str, bytes: &[u8]| json!({ "mediaType": kind, "digest": digest(bytes), "size": bytes.len() });
    let manifest = serde_json::to_vec(&json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": blob(CONFIG, &config),
        "layers": [blob(LAYER, &content)],
    }))?;
    let of = |kind: &str, name_of: &str| format!("/v2/{name}/{kind}/{name_of}");
    let by_digest = (of("manifests", &digest(&manifest)), (MANIFEST, manifest.clone()));
    let blobs = [config, content].map(|bytes| (of("blobs", &digest(&bytes)), ("application/octet-stream", bytes)));
    let others = [("/v2/".to_owned(), ("text/plain", Vec::new())), (of("manifests", "1"), (MANIFEST, manifest))];
    Ok(blobs.into_iter().chain(others).chain([by_digest]).collect())
}

fn answer(mut stream: TcpStream, pages: &Pages, asked: &AtomicUsize) -> std::io::Result<()> {
    let mut request = [0; 4096];
    let length = stream.read(&mut request)?;
    let request = String::from_utf8_lossy(&request[..length]).into_owned();
    let mut words = request.split_whitespace();
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = target.split('?').next().unwrap_or_default();
    let Some((kind, bytes)) = pages.get(path) else {
        return stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    };
    if path.ends_with("/manifests/1") {
        asked.fetch_add(1, Ordering::SeqCst);
    }
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nDocker-Content-Digest: {}\r\n\
         Connection: close\r\n\r\n",
        bytes.len(),
        digest(bytes)
    );
    stream.write_all(head.as_bytes())?;
    if method == "HEAD" { Ok(()) } else { stream.write_all(bytes) }
}
