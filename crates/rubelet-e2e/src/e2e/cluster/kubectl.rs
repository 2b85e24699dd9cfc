//! kubectl on a running pod: logs, exec, cp, port-forward. All requests go
//! from the API server to the agent's own port.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, TcpStream},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{
    command::{Output, SHORT, capture},
    image::BUSYBOX,
    process::{Daemon, start_daemon},
};
use serde_json::json;

use crate::e2e::{
    cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, account, pod, spec},
    secured_port,
};

pub const CASES: &[ClusterCase] = &[
    ClusterCase { name: "kubectl logs shows what a container wrote, as asked", plane: Plane::Shared, run: logs },
    ClusterCase { name: "kubectl exec, attach and cp reach into a pod", plane: Plane::Shared, run: exec },
    ClusterCase { name: "kubectl port-forward carries many connections at once", plane: Plane::Shared, run: forward },
    ClusterCase { name: "who may not use the agent's port gets nothing from it", plane: Plane::Shared, run: rights },
];

fn ask(cluster: &ClusterNode, args: &[&str]) -> anyhow::Result<Output> {
    capture(&mut cluster.kubectl_command(args), SHORT)
}

fn logs(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    // The runtime reads both outputs, and which of them first is its own affair.
    let script = format!("echo one; sleep 1; echo two >&2; sleep 1; printf 'three'; echo; {OBEDIENT}");
    let mut spec = spec(&cluster.name, &script);
    spec["initContainers"] = json!([{ "name": "first", "image": BUSYBOX, "command": ["echo", "init"] }]);
    cluster.apply(pod("web", &spec))?;
    cluster.wait_running("web", 60)?;
    let all = cluster.wait("its three lines", 10, |cluster| {
        let all = cluster.kubectl(&["logs", "web"])?;
        ensure!(all.lines().count() == 3, "{all:?}");
        Ok(all)
    })?;
    ensure!(all == "one\ntwo\nthree\n", "{all:?}");
    for (args, expected) in [
        (&["--tail=1"][..], "three\n"),
        (&["--limit-bytes=4"], &all[..4]),
        (&["--since=1h", "--tail=-1"], &all),
        (&["-c", "first"], "init\n"),
    ] {
        let args: Vec<&str> = ["logs", "web"].iter().chain(args).copied().collect();
        let answer = cluster.kubectl(&args)?;
        ensure!(answer == expected, "{args:?}: {answer:?}");
    }
    let stamped = cluster.kubectl(&["logs", "web", "--timestamps", "--tail=1"])?;
    ensure!(stamped.starts_with("20") && stamped.ends_with("Z three\n"), "{stamped:?}");
    let previous = ask(cluster, &["logs", "web", "--previous"])?;
    let told = "previous terminated container \"main\" in pod \"web\" not found";
    ensure!(!previous.success && previous.stderr.contains(told), "{previous:?}");
    // Followed until the container ends.
    let mut follow = cluster.kubectl_command(&["logs", "-f", "web"]);
    let follow = follow.stdout(Stdio::piped()).spawn().context("kubectl logs -f")?;
    cluster.kubectl(&["delete", "pod", "web", "--wait=false"])?;
    let followed = follow.wait_with_output()?;
    ensure!(followed.stdout == all.as_bytes(), "{followed:?}");
    cluster.wait_none(30)
}

const BIG_BYTES: usize = 64 << 20;

fn exec(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    // Prints what is typed into it.
    let script = "while read line; do echo \"read $line\"; done; sleep 3600";
    let mut spec = spec(&cluster.name, script);
    spec["containers"][0]["stdin"] = json!(true);
    spec["terminationGracePeriodSeconds"] = json!(0);
    cluster.apply(pod("web", &spec))?;
    cluster.wait_running("web", 60)?;
    let spoken = ask(cluster, &["exec", "web", "--", "sh", "-c", "echo out; echo err >&2; exit 7"])?;
    ensure!(spoken.code == Some(7) && spoken.stdout == "out\n" && spoken.stderr.starts_with("err\n"), "{spoken:?}");
    let missing = ask(cluster, &["exec", "web", "--", "/no/such/program"])?;
    ensure!(!missing.success && missing.stderr.contains("no such file or directory"), "{missing:?}");

    // Through standard input and output, more than any buffer holds.
    let big: Vec<u8> = (0..BIG_BYTES).map(|number| ((number * 2_654_435_761) >> 13) as u8).collect();
    let (near, back) = (cluster.node.bed.layout.dir.join("near"), cluster.node.bed.layout.dir.join("back"));
    fs::write(&near, &big)?;
    let mut cat = cluster.kubectl_command(&["exec", "-i", "web", "--", "cat"]);
    let status = cat.stdin(fs::File::open(&near)?).stdout(fs::File::create(&back)?).status()?;
    ensure!(status.success() && fs::read(&back)? == big, "what came back is not what went in: {status}");

    let (from, to) = (near.display().to_string(), back.display().to_string());
    cluster.kubectl(&["cp", &from, "web:/tmp/far"])?;
    cluster.kubectl(&["cp", "web:/tmp/far", &to])?;
    ensure!(fs::read(&back)? == big, "a file changed on its way");

    let mut attach = cluster.kubectl_command(&["attach", "-i", "web"]);
    let mut attach = attach.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("kubectl attach")?;
    let mut stdin = attach.stdin.take().context("its standard input")?;
    let mut stdout = attach.stdout.take().context("its standard output")?;
    stdin.write_all(b"hello\n")?;
    let mut heard = [0; 11];
    let answer = stdout.read_exact(&mut heard);
    attach.kill()?;
    attach.wait()?;
    answer.context("nothing came back")?;
    ensure!(&heard == b"read hello\n", "{:?}", String::from_utf8_lossy(&heard));
    cluster.kubectl(&["delete", "pod", "web"])?;
    cluster.wait_none(30)
}

const CONNECTIONS: usize = 100;

fn forward(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    // Echoes every connection. The backlog is as long as the number of letters: beyond it the kernel drops
    // a connection, which is retried only after seconds.
    let echo = format!("nc -{} -p 8080 -e cat", "l".repeat(CONNECTIONS));
    cluster.apply(pod("web", &spec(&cluster.name, &echo)))?;
    cluster.wait_running("web", 60)?;
    let dir = cluster.node.bed.layout.dir.clone();
    let (log, pid) = (dir.join("forward.log"), dir.join("forward.pid"));
    let mut kubectl = cluster.kubectl_command(&["port-forward", "pod/web", ":8080"]);
    let mut forward = Forward(start_daemon(&mut kubectl, &log, &pid)?);
    let port: u16 = cluster.wait("kubectl listens", 20, |_| {
        let text = fs::read_to_string(&log)?;
        let port = text.split("127.0.0.1:").nth(1).and_then(|rest| rest.split(' ').next());
        port.and_then(|port| port.parse().ok()).with_context(|| text.clone())
    })?;
    let mut open = Vec::new();
    for _ in 0..CONNECTIONS {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        open.push(stream);
    }
    for (number, stream) in open.iter_mut().enumerate() {
        writeln!(stream, "line {number:03}")?;
    }
    for (number, stream) in open.iter_mut().enumerate() {
        let mut line = [0; 9];
        stream.read_exact(&mut line).with_context(|| format!("connection {number}: {:?}", fs::read_to_string(&log)))?;
        ensure!(line == *format!("line {number:03}\n").as_bytes(), "connection {number}: {line:?}");
    }
    drop(open);
    forward.0.end(Duration::from_secs(5));
    cluster.kubectl(&["delete", "pod", "web", "--grace-period=1"])?;
    cluster.wait_none(30)
}

/// Ended with the test, however it ends.
struct Forward(Daemon);

impl Drop for Forward {
    fn drop(&mut self) {
        self.0.end(Duration::from_secs(5));
    }
}

/// An account with exactly the right to read pods, on the node's own port.
fn rights(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let healthz = cluster.kubectl(&["get", "--raw", &format!("/api/v1/nodes/{}/proxy/healthz", cluster.name)])?;
    ensure!(healthz == "ok", "{healthz}");
    let token = account(cluster, "reader", &["pods"])?;
    let expected = [
        ("/pods", None, 401, "Unauthorized".to_owned()),
        ("/pods", Some("not-a-token"), 401, "Unauthorized".to_owned()),
        (
            "/configz",
            Some(token.as_str()),
            403,
            format!(
                "Forbidden (user=system:serviceaccount:{}:reader, verb=get, resource=nodes, subresource(s)=[configz \
                 proxy])\n",
                cluster.name
            ),
        ),
    ];
    for (path, token, status, body) in expected {
        let answer = secured_port::get(&cluster.node.agent, path, token)?;
        ensure!(answer == (status, body.clone()), "{path} {token:?}: {answer:?} instead of {status} {body:?}");
    }
    let (status, body) = secured_port::get(&cluster.node.agent, "/pods", Some(&token))?;
    ensure!(status == 200 && body.contains("\"PodList\""), "{status} {body}");
    Ok(())
}
