//! Requests to the API server, through `kubectl proxy` on a socket: plain HTTP, as the administrator.
//!
//! Owns: requests and watches. A process per request would be too slow.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, bail};
use serde_json::Value;

/// Long enough for a busy machine; a server that is down fails at once.
const ANSWER: Duration = Duration::from_secs(20);

#[derive(Clone, Debug)]
pub struct Api {
    socket: PathBuf,
}

impl Api {
    pub fn new(socket: PathBuf) -> Self {
        Api { socket }
    }

    pub fn get(&self, path: &str) -> anyhow::Result<Value> {
        serde_json::from_str(&self.get_text(path)?).with_context(|| format!("the answer to GET {path}"))
    }

    pub fn get_text(&self, path: &str) -> anyhow::Result<String> {
        let mut answer = String::new();
        self.ask(path, ANSWER)?.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// A list's items.
    pub fn list(&self, path: &str) -> anyhow::Result<Vec<Value>> {
        let mut list = self.get(path)?;
        match list["items"].take() {
            Value::Array(items) => Ok(items),
            Value::Null => Ok(Vec::new()),
            other => bail!("GET {path}: items are {other}"),
        }
    }

    /// One watch event per line, until the connection ends. `silence` is the read timeout.
    pub fn watch(&self, path: &str, silence: Duration) -> anyhow::Result<BufReader<UnixStream>> {
        self.ask(path, silence)
    }

    /// Creates an object in the collection at `path`.
    pub fn create(&self, path: &str, object: &Value) -> anyhow::Result<()> {
        self.send("POST", path, &object.to_string(), ANSWER).map(drop)
    }

    /// Asks for the deletion; the pod's grace period follows.
    pub fn delete(&self, path: &str) -> anyhow::Result<()> {
        self.send("DELETE", path, "", ANSWER).map(drop)
    }

    fn ask(&self, path: &str, limit: Duration) -> anyhow::Result<BufReader<UnixStream>> {
        self.send("GET", path, "", limit)
    }

    /// In HTTP/1.0, so that the response ends with the connection. The reader is at the body.
    fn send(&self, method: &str, path: &str, body: &str, limit: Duration) -> anyhow::Result<BufReader<UnixStream>> {
        let mut socket = UnixStream::connect(&self.socket)
            .with_context(|| format!("no `kubectl proxy` on {}", self.socket.display()))?;
        socket.set_read_timeout(Some(limit))?;
        let length = body.len();
        write!(
            socket,
            "{method} {path} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        )?;
        let mut reader = BufReader::new(socket);
        let mut status = String::new();
        reader.read_line(&mut status)?;
        let mut header = String::new();
        while reader.read_line(&mut header)? > 2 {
            header.clear();
        }
        if ![" 200 ", " 201 ", " 202 "].iter().any(|code| status.contains(code)) {
            let mut body = String::new();
            let _ = reader.read_to_string(&mut body);
            bail!("{method} {path}: {} {body}", status.trim());
        }
        Ok(reader)
    }
}
