//! Streams at their limits: every flag of `kubectl logs`, gigabytes through `kubectl exec`, terminals, debugging copies and
//! nodes, `kubectl proxy`.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, TcpStream},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{
    clock::Stopwatch,
    command::{SHORT, capture, command},
    image::BUSYBOX,
    process::{Daemon, start_daemon},
};
use serde_json::json;

use crate::e2e::{
    cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, account, pod, spec},
    secured_port,
};

pub const CASES: &[ClusterCase] = &[
    ClusterCase { name: "kubectl exec carries much in and out unchanged", plane: Plane::Shared, run: much },
    ClusterCase {
        name: "kubectl exec gives a command a terminal of the caller's size",
        plane: Plane::Shared,
        run: tty,
    },
    ClusterCase { name: "kubectl logs heeds every flag it has", plane: Plane::Shared, run: logs },
    ClusterCase { name: "kubectl debug copies a pod and looks at the node", plane: Plane::Shared, run: debug },
    ClusterCase { name: "a static pod answers to the UID of its mirror", plane: Plane::Shared, run: mirror },
    ClusterCase { name: "kubectl proxy reaches the agent's port", plane: Plane::Shared, run: proxy },
    ClusterCase {
        name: "commands and attachments that are abandoned leave no descriptor in the agent",
        plane: Plane::Shared,
        run: abandoned,
    },
];

/// `RUBELET_E2E_STREAM_MIB=1024` makes it a gigabyte.
const STREAM_MIB: &str = "RUBELET_E2E_STREAM_MIB";
const TEXT: &str = "a line that is repeated until there is enough of it";

fn much(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    cluster.apply(pod("web", &spec(&cluster.name, OBEDIENT)))?;
    cluster.wait_running("web", 60)?;
    let mib: u64 = std::env::var(STREAM_MIB).map_or(Ok(128), |text| text.parse()).context(STREAM_MIB)?;
    let bytes = (mib << 20).to_string();
    let limit = Duration::from_secs(60 + mib);

    let mut sum = command("sha256sum", [""; 0]);
    let expected = capture(sum.stdin(repeated(&bytes)?.out()?), limit)?.stdout;
    let watch = Stopwatch::start();
    let mut input = cluster.kubectl_command(&["exec", "-i", "web", "--", "sha256sum"]);
    let got = capture(input.stdin(repeated(&bytes)?.out()?), limit)?;
    ensure!(got.success && got.stdout == expected, "in: {got:?} instead of {expected:?}");
    let into_secs = watch.secs();

    let watch = Stopwatch::start();
    let script = format!("yes '{TEXT}' | head -c {bytes}");
    let mut output = cluster.kubectl_command(&["exec", "web", "--", "sh", "-c", &script]);
    let mut output = Piped::new(output.stdin(Stdio::null()))?;
    let mut sum = command("sha256sum", [""; 0]);
    let got = capture(sum.stdin(output.out()?), limit)?.stdout;
    ensure!(output.child.wait()?.success() && got == expected, "out: {got:?} instead of {expected:?}");
    println!("        {mib} MiB: in {into_secs:.1} s, out {:.1} s", watch.secs());

    // Which protocol was used: kubectl uses the newest, and the API server passes it on to an agent that declares it.
    let declared = cluster.kubectl(&["get", "node", &cluster.name, "-o=jsonpath={.status.declaredFeatures}"])?;
    ensure!(declared.contains("\"ExtendWebSocketsToKubelet\""), "{declared}");
    let metrics = cluster.plane().kubectl(&["get", "--raw", "/metrics"])?;
    let passed_on = metrics.lines().find(|line| {
        line.contains("websocket_streaming_requests_total")
            && line.contains("exec")
            && line.contains("proxied_to_kubelet")
    });
    ensure!(passed_on.is_some(), "the API server translated it itself");
    cluster.kubectl(&["delete", "pod", "web"])?;
    cluster.wait_none(30)
}

/// A process whose output is read, and the one it reads from. Killed on drop.
struct Piped {
    child: Child,
    source: Option<Box<Piped>>,
}

impl Piped {
    fn new(command: &mut Command) -> anyhow::Result<Self> {
        Ok(Piped { child: command.stdout(Stdio::piped()).spawn()?, source: None })
    }

    fn out(&mut self) -> anyhow::Result<Stdio> {
        Ok(self.child.stdout.take().context("its output")?.into())
    }
}

impl Drop for Piped {
    fn drop(&mut self) {
        // It has ended, or its reader has.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// This many bytes of text.
fn repeated(bytes: &str) -> anyhow::Result<Piped> {
    let mut endless = Piped::new(&mut command("yes", [TEXT]))?;
    let mut head = Piped::new(command("head", ["-c", bytes]).stdin(endless.out()?))?;
    head.source = Some(Box::new(endless));
    Ok(head)
}

fn tty(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    cluster.apply(pod("web", &spec(&cluster.name, OBEDIENT)))?;
    cluster.wait_running("web", 60)?;
    // The size arrives after the terminal exists.
    let inside = "tty; until [ \"$(stty size)\" = '33 77' ]; do sleep 0.1; done; echo sized; exit 5";
    let kubectl = cluster.kubectl_command(&["exec", "-it", "web", "--", "sh", "-c"]);
    let words: Vec<String> = [kubectl.get_program()]
        .into_iter()
        .chain(kubectl.get_args())
        .map(|it| it.to_string_lossy().into_owned())
        .collect();
    // `script` gives a terminal to a shell command; the arguments are trusted.
    let line = format!("stty rows 33 cols 77; exec {} \"$INSIDE\"", words.join(" "));
    let mut script = command("script", ["-qec", &line, "/dev/null"]);
    let set = kubectl.get_envs().filter_map(|(name, value)| Some((name, value?)));
    let seen = capture(script.envs(set).env("INSIDE", inside).env("SHELL", "/bin/sh"), SHORT)?;
    ensure!(seen.code == Some(5) && seen.stdout.contains("/dev/pts/") && seen.stdout.contains("sized"), "{seen:?}");
    cluster.kubectl(&["delete", "pod", "web"])?;
    cluster.wait_none(30)
}

fn logs(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    // The first run fails, the second stays.
    let twice =
        format!("if [ -e /kept/ran ]; then echo again; {OBEDIENT}; else touch /kept/ran; echo first; exit 1; fi");
    let mut spec = spec(&cluster.name, &twice);
    spec["volumes"] = json!([{ "name": "kept", "emptyDir": {} }]);
    spec["containers"][0]["volumeMounts"] = json!([{ "name": "kept", "mountPath": "/kept" }]);
    let side = format!("echo one; sleep 2; echo two >&2; {OBEDIENT}");
    let side = json!({ "name": "side", "image": BUSYBOX, "command": ["sh", "-c", side] });
    spec["containers"].as_array_mut().context("containers")?.push(side);
    cluster.apply(pod("web", &spec))?;
    let expected = |args: &[&str], expected: &str| {
        let args: Vec<&str> = ["logs", "web"].iter().chain(args).copied().collect();
        cluster.wait("what kubectl logs shows", 30, |cluster| {
            let shown = cluster.kubectl(&args)?;
            ensure!(shown == expected, "{args:?}: {shown:?}");
            Ok(())
        })
    };
    expected(&["-c", "main"], "again\n")?;
    expected(&["-c", "main", "--previous"], "first\n")?;
    expected(&["-c", "main", "-p", "--tail=1"], "first\n")?;
    expected(&["-c", "side"], "one\ntwo\n")?;
    expected(&["--all-containers", "--prefix", "--tail=1"], "[pod/web/main] again\n[pod/web/side] two\n")?;
    expected(&["-c", "side", "--limit-bytes=5"], "one\nt")?;
    expected(&["-c", "side", "--tail=0"], "")?;
    expected(&["-c", "side", "--tail=100"], "one\ntwo\n")?;
    expected(&["-c", "side", "--since=1h"], "one\ntwo\n")?;
    expected(&["-c", "side", "--since-time=2020-01-01T00:00:00Z"], "one\ntwo\n")?;
    expected(&["-c", "side", "--since=1s"], "")?;

    let stamped = cluster.kubectl(&["logs", "web", "-c", "side", "--timestamps"])?;
    let moment = |line: &str| line.split(' ').next().map(str::to_owned).context("no moment");
    let second = moment(stamped.lines().nth(1).context("no second line")?)?;
    // Kubernetes has timestamps in whole seconds: the second line's own second still includes it.
    let second = format!("{}Z", second.split('.').next().context("no fraction")?);
    expected(&["-c", "side", &format!("--since-time={second}")], "two\n")?;
    let wrong = capture(&mut cluster.kubectl_command(&["logs", "web", "-c", "none"]), SHORT)?;
    ensure!(!wrong.success && wrong.stderr.contains("container none is not valid for pod web"), "{wrong:?}");

    let mut follow = cluster.kubectl_command(&["logs", "-f", "web", "--all-containers", "--prefix", "--tail=1"]);
    let mut follow = Piped::new(&mut follow)?;
    cluster.kubectl(&["delete", "pod", "web", "--wait=false"])?;
    let mut followed = String::new();
    follow.child.stdout.take().context("its output")?.read_to_string(&mut followed)?;
    let mut lines: Vec<&str> = followed.lines().collect();
    lines.sort_unstable();
    ensure!(lines == ["[pod/web/main] again", "[pod/web/side] two"], "{followed:?}");
    cluster.wait_none(30)
}

fn debug(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    cluster.apply(pod("web", &spec(&cluster.name, OBEDIENT)))?;
    cluster.wait_running("web", 60)?;
    let image = format!("--image={BUSYBOX}");
    let look = format!("echo looked; {OBEDIENT}");
    let copy =
        ["debug", "web", "--copy-to=copy", &image, "--container=debugger", "--attach=false", "--profile=general"];
    let copied: Vec<&str> = copy.into_iter().chain(["--", "sh", "-c", &look]).collect();
    cluster.kubectl(&copied)?;
    cluster.wait_running("copy", 60)?;
    let shown = cluster.kubectl(&["logs", "copy", "-c", "debugger"])?;
    ensure!(shown == "looked\n", "{shown:?}");
    cluster.kubectl(&["delete", "pod", "web", "copy"])?;

    // On the node itself: its processes and its root directory.
    let node = format!("node/{}", cluster.name);
    let look = "ls /host/etc/hostname && ls -d /proc/1 && echo seen";
    let args = ["debug", &node, &image, "--attach=false", "--profile=general", "--", "sh", "-c", look];
    let told = cluster.kubectl(&args)?;
    let name = told.split_whitespace().find(|word| word.starts_with("node-debugger-"));
    let name = name.with_context(|| told.clone())?.to_owned();
    let seen = cluster.wait("the node was looked at", 60, |cluster| {
        let seen = cluster.kubectl(&["logs", &name])?;
        ensure!(seen.ends_with("seen\n"), "{seen:?}");
        Ok(seen)
    })?;
    ensure!(seen.contains("/host/etc/hostname"), "{seen:?}");
    cluster.kubectl(&["delete", "pod", &name])?;
    cluster.wait_none(30)
}

fn mirror(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let mut own = pod("own", &spec(&cluster.name, OBEDIENT));
    own["metadata"]["namespace"] = json!(cluster.name);
    cluster.node.drop_file("own.json", own.to_string().as_bytes())?;
    let name = format!("own-{}", cluster.name);
    let seen = cluster.wait_running(&name, 60)?;
    let annotation = "-o=jsonpath={.metadata.annotations.kubernetes\\.io/config\\.mirror}";
    let own_uid = cluster.kubectl(&["get", "pod", &name, annotation])?;
    ensure!(!own_uid.is_empty() && own_uid != seen.uid(), "{own_uid:?} is the mirror's UID");
    let nothing = cluster.node.bed.layout.dir.join("nothing");
    fs::write(&nothing, "")?;
    let run = |uid: &str| {
        let (node, nothing) = (&cluster.name, nothing.display());
        let path = format!("/api/v1/nodes/{node}/proxy/run/{node}/{name}/{uid}/main?cmd=echo+here");
        capture(&mut cluster.kubectl_command(&["create", "--raw", &path, &format!("--filename={nothing}")]), SHORT)
    };
    for uid in [seen.uid(), &own_uid] {
        let ran = run(uid)?;
        ensure!(ran.success && ran.stdout.contains("here"), "{uid}: {ran:?}");
    }
    let stranger = run("00000000-0000-0000-0000-000000000000")?;
    // Upstream's kubelet accepts any UID if the name is right.
    let is_refused = !stranger.success && stranger.stderr.contains("container not found");
    ensure!(is_refused || cluster.node.agent.is_upstream(), "{stranger:?}");
    cluster.node.remove("own")?;
    cluster.wait_none(30)
}

fn proxy(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    cluster.apply(pod("web", &spec(&cluster.name, &format!("echo here; {OBEDIENT}"))))?;
    cluster.wait_running("web", 60)?;
    let dir = cluster.node.bed.layout.dir.clone();
    let (log, pid) = (dir.join("proxy.log"), dir.join("proxy.pid"));
    let mut kubectl = cluster.kubectl_command(&["proxy", "--port=0"]);
    let _proxy = Ended(start_daemon(&mut kubectl, &log, &pid)?);
    let port: u16 = cluster.wait("kubectl listens", 20, |_| {
        let text = fs::read_to_string(&log)?;
        let port = text.split("127.0.0.1:").nth(1).and_then(|rest| rest.split_whitespace().next());
        port.and_then(|port| port.parse().ok()).with_context(|| text.clone())
    })?;
    let get = |path: &str| -> anyhow::Result<String> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        let path = format!("/api/v1/nodes/{}/proxy/{path}", cluster.name);
        write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    let namespace = &cluster.name;
    for (path, expected) in [
        ("healthz", "\r\n\r\nok"),
        ("pods", "\"kind\":\"PodList\""),
        ("runningpods/", "\"name\":\"web\""),
        ("configz", "\"kubeletconfig\""),
        (&format!("containerLogs/{namespace}/web/main"), "\r\n\r\nhere\n"),
        (&format!("containerLogs/{namespace}/web/none"), "container \"none\" not found in pod \"web\""),
    ] {
        cluster.wait("what the agent answers", 10, |_| {
            let answer = get(path)?;
            ensure!(answer.contains(expected), "{path}: {answer}");
            Ok(())
        })?;
    }
    cluster.kubectl(&["delete", "pod", "web"])?;
    cluster.wait_none(30)
}

/// `RUBELET_E2E_ABANDONED=1000` makes it a thousand. After ten thousand containerd takes more than a minute to stop the pod.
const ABANDONED: &str = "RUBELET_E2E_ABANDONED";
const AT_ONCE: usize = 50;
/// The agent's own descriptors, such as connections to the API server.
const ITS_OWN: usize = 5;
const SPDY: &str = "Upgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\n";
/// The head of a caller's request.
pub const WEBSOCKET: &str = "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: v5.channel.k8s.io\r\n\
                         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";

fn abandoned(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    let mut spec = spec(&cluster.name, OBEDIENT);
    spec["containers"][0]["stdin"] = json!(true);
    cluster.apply(pod("web", &spec))?;
    cluster.wait_running("web", 60)?;
    let token = account(cluster, "caller", &["proxy"])?;
    let many: usize = std::env::var(ABANDONED).map_or(Ok(200), |text| text.parse()).context(ABANDONED)?;
    let open = |number: usize| -> anyhow::Result<_> {
        let (what, protocol) =
            [("attach", SPDY), ("exec", WEBSOCKET), ("attach", WEBSOCKET), ("exec", SPDY)][number % 4];
        let path = format!("/{what}/{}/web/main?input=1&output=1&command=cat", cluster.name);
        let mut stream = secured_port::connect(&cluster.node.agent)?;
        let headers = format!("Host: n\r\nConnection: Upgrade\r\nAuthorization: Bearer {token}\r\n{protocol}");
        write!(stream, "GET {path} HTTP/1.1\r\n{headers}\r\n")?;
        let mut head = [0; 12];
        stream.read_exact(&mut head)?;
        ensure!(&head == b"HTTP/1.1 101", "{path}: {}", String::from_utf8_lossy(&head));
        Ok(stream)
    };
    let pid = cluster.node.agent.pid().context("the agent runs")?;
    let descriptors = || anyhow::Ok(fs::read_dir(format!("/proc/{pid}/fd"))?.count());
    let before = descriptors()?;
    for round in 0..many.div_ceil(AT_ONCE) {
        let streams: Vec<_> = (0..AT_ONCE).map(|number| open(round + number)).collect::<Result<_, _>>()?;
        ensure!(descriptors()? >= before + AT_ONCE, "the streams are not the agent's");
        drop(streams);
    }
    cluster.wait("all are forgotten", 60, |_| {
        let after = descriptors()?;
        ensure!(after <= before + ITS_OWN, "{after} descriptors instead of {before}");
        Ok(())
    })?;
    cluster.kubectl(&["delete", "pod", "web"])?;
    cluster.wait_none(30)
}

/// Ended with the test, however it ends.
struct Ended(Daemon);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.end(Duration::from_secs(5));
    }
}
