//! Pods from a URL, and pods that run once.

use std::{
    io::{Read as _, Write as _},
    net::TcpListener,
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use anyhow::ensure;
use rubelet_testbed::agent::AgentOptions;
use serde_json::{Value, json};

use crate::e2e::{
    Case,
    manifest::{OBEDIENT, Pod},
    node::Node,
};

pub const CASES: &[Case] = &[
    Case { name: "pods of a URL run, and stay as they are while its server fails", run: from_url },
    Case { name: "a pod that runs once completes, and is not started again by a new agent", run: once },
];

/// A server with one page, which the test may change. It ends with the program.
struct Page {
    url: String,
    /// Status and body; a status of 0 is a connection closed without a response.
    answer: Arc<Mutex<(u16, String)>>,
}

impl Page {
    fn serve() -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let url = format!("http://{}/pods", listener.local_addr()?);
        let answer = Arc::new(Mutex::new((0, String::new())));
        let shared = answer.clone();
        thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let (status, body) = shared.lock().unwrap_or_else(PoisonError::into_inner).clone();
                let mut request = [0; 4096];
                let length = stream.read(&mut request).unwrap_or(0);
                let has_token = String::from_utf8_lossy(&request[..length]).contains("secret-of-the-test");
                let status = if has_token { status } else { 403 };
                if status != 0 {
                    let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n", body.len());
                    // The client disconnected.
                    let _ = stream.write_all(format!("{head}{body}").as_bytes());
                }
            }
        });
        Ok(Page { url, answer })
    }

    fn says(&self, status: u16, body: &Value) {
        *self.answer.lock().unwrap_or_else(PoisonError::into_inner) = (status, body.to_string());
    }
}

fn from_url(node: &mut Node) -> anyhow::Result<()> {
    let page = Page::serve()?;
    node.reconfigure(&AgentOptions { url: Some(page.url.clone()), ..AgentOptions::default() })?;
    let one = Pod::new("one", OBEDIENT).notes(&node.notes("one")).manifest();
    let two = Pod::new("two", OBEDIENT).notes(&node.notes("two")).manifest();
    page.says(200, &json!({ "apiVersion": "v1", "kind": "PodList", "items": [one, two] }));
    node.agent.start()?;
    let before = node.wait_running("one", 60)?.identity("main")?;
    node.wait_running("two", 60)?;

    for (status, body) in [(500, json!("down")), (0, json!(null)), (200, json!("no pod at all"))] {
        page.says(status, &body);
        thread::sleep(std::time::Duration::from_secs(3));
        let now = node.wait_running("one", 5)?.identity("main")?;
        ensure!(now == before, "an answer of {status} changed the pod: {before:?} became {now:?}");
    }
    page.says(200, &one);
    node.wait_gone("two", 30)?;
    ensure!(node.pod("one")?.identity("main")? == before, "the pod that stayed was touched");
    Ok(())
}

fn once(node: &mut Node) -> anyhow::Result<()> {
    node.agent.start()?;
    let notes = node.notes("once");
    let mut manifest = Pod::new("once", "echo start >> /notes/main; exit 0").notes(&notes).manifest();
    manifest["spec"]["restartPolicy"] = json!("Never");
    manifest["spec"]["containers"][0]["volumeMounts"]
        .as_array_mut()
        .expect("the pod mounts its notes")
        .push(json!({ "name": "scratch", "mountPath": "/scratch" }));
    manifest["spec"]["volumes"]
        .as_array_mut()
        .expect("the pod has volumes")
        .push(json!({ "name": "scratch", "emptyDir": { "medium": "Memory", "sizeLimit": "1Mi" } }));
    node.drop_file("once.json", manifest.to_string().as_bytes())?;
    let completed = |node: &Node| {
        let pod = node.pod("once")?;
        let ended = &pod.container("main")["state"]["terminated"];
        ensure!(pod.phase() == "Succeeded" && ended["reason"] == "Completed", "{}", pod.status());
        Ok(())
    };
    node.wait("the pod succeeds", 60, completed)?;
    node.agent.kill();
    node.agent.start()?;
    node.wait("the pod is known as succeeded", 30, completed)?;
    thread::sleep(std::time::Duration::from_secs(3));
    ensure!(node.noted("once") == ["start"], "it ran {} times", node.noted("once").len());
    node.remove("once")?;
    node.wait_gone("once", 30)
}
