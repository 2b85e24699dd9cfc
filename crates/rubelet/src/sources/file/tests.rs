//! The rules about single looks are tested on their results; noticing changes is tested on a real directory.

use std::{fs, os::unix::fs::symlink, process::Command};

use insta::assert_snapshot;
use tempfile::TempDir;
use tokio::task::JoinHandle;

use super::*;
use crate::world::testing::world_in;

fn manifest(name: &str, image: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\nspec:\n  containers:\n  - name: c\n    image: {image}\n"
    )
}

fn names(pods: &[Arc<Pod>]) -> String {
    let name = |pod: &Arc<Pod>| {
        let image = pod.spec.as_ref().unwrap().containers[0].image.clone().unwrap();
        format!("{}={image}", pod.metadata.name.as_deref().unwrap())
    };
    pods.iter().map(name).collect::<Vec<_>>().join(" ")
}

/// One line per read: the pods after it and the reports.
fn played(looks: &[&[(&str, &str)]]) -> String {
    let mut manifests = Manifests { node_name: "n1".to_owned(), files: BTreeMap::new() };
    let mut lines = Vec::new();
    for look in looks {
        let found = look.iter().map(|(path, text)| match text.strip_prefix("error: ") {
            Some("dangling") => (PathBuf::from(path), Content::Dangling),
            Some(problem) if problem.contains("os error") => {
                (PathBuf::from(path), Content::Unreadable(problem.to_owned()))
            }
            Some(problem) => (PathBuf::from(path), Content::Unfit(problem.to_owned())),
            None => (PathBuf::from(path), Content::Text(text.as_bytes().to_vec())),
        });
        let news = manifests.take(found.collect());
        let news: Vec<String> = news
            .iter()
            .map(|news| match news {
                News::Refused { path, problem } => format!("\n  refused {}: {problem}", path.display()),
                News::Remark { path, remark } => format!("\n  remark {}: {remark}", path.display()),
            })
            .collect();
        let more = if manifests.has_unread() { " and more" } else { "" };
        lines.push(format!("[{}{more}]{}", names(&manifests.pods()), news.concat()));
    }
    lines.join("\n")
}

#[test]
fn invalid_manifest_keeps_its_pods_and_is_reported_once() {
    let (v1, v2) = (manifest("web", "nginx:1"), manifest("web", "nginx:2"));
    let half = &v2[..v2.len() / 2];
    let found = played(&[
        &[("/m/web", &v1)],
        &[("/m/web", "")],
        &[("/m/web", half)],
        &[("/m/web", half)],
        &[("/m/web", half)],
        &[("/m/web", "error: Permission denied (os error 13)")],
        &[("/m/web", "error: Permission denied (os error 13)")],
        &[("/m/web", &v2)],
        &[],
    ]);
    assert_snapshot!(found, @"
    [web-n1=nginx:1]
    [web-n1=nginx:1]
    [web-n1=nginx:1]
    [web-n1=nginx:1]
      refused /m/web: not YAML: simple key expected ':' at line 5, column 1; the pod keeps running as it was last good
    [web-n1=nginx:1]
    [web-n1=nginx:1]
    [web-n1=nginx:1]
      refused /m/web: Permission denied (os error 13); the pod keeps running as it was last good
    [web-n1=nginx:2]
    []
    ");
}

#[test]
fn invalid_file_affects_no_other_file() {
    let (a, c) = (manifest("a", "a:1"), manifest("c", "c:1"));
    let unknown = format!("{}  surprise: 1\n---\nmore: 1\n", manifest("d", "d:1"));
    let looks: &[(&str, &str)] = &[
        ("/m/a", &a),
        ("/m/b", "not a pod"),
        ("/m/c", &c),
        ("/m/d", &unknown),
        ("/m/e", "error: it is a Fifo, not a regular file"),
    ];
    assert_snapshot!(played(&[looks, looks, looks]), @r#"
    [a-n1=a:1 c-n1=c:1 d-n1=d:1]
      remark /m/d: only the first document is used, 1 more are ignored: one pod per manifest
      remark /m/d: unknown field "spec.surprise"
    [a-n1=a:1 c-n1=c:1 d-n1=d:1]
      refused /m/b: invalid pod: [expected a v1 Pod, found a string]
      refused /m/e: it is a Fifo, not a regular file
    [a-n1=a:1 c-n1=c:1 d-n1=d:1]
    "#);
}

#[test]
fn a_file_that_was_never_read_makes_the_set_partial() {
    let (web, dns) = (manifest("web", "nginx:1"), manifest("dns", "dns:1"));
    let bad = "error: Input/output error (os error 5)";
    let found = played(&[
        &[("/m/dns", bad), ("/m/web", &web)],
        &[("/m/dns", &dns), ("/m/web", &web)],
        &[("/m/dns", bad), ("/m/web", &web)],
        &[("/m/dns", "error: it is a Fifo, not a regular file"), ("/m/web", &web)],
    ]);
    assert_snapshot!(found, @"
    [web-n1=nginx:1 and more]
    [dns-n1=dns:1 web-n1=nginx:1]
    [dns-n1=dns:1 web-n1=nginx:1]
    [dns-n1=dns:1 web-n1=nginx:1]
    ");
}

#[test]
fn broken_link_removes_its_pods() {
    let text = manifest("web", "nginx:1");
    let found = played(&[&[("/m/web", &text)], &[("/m/web", "error: dangling")], &[("/m/web", "error: dangling")]]);
    assert_snapshot!(found, @"
    [web-n1=nginx:1]
    []
    []
      refused /m/web: it is a link that leads nowhere
    ");
}

struct FileSourceFixture {
    dir: TempDir,
    world: World,
    task: JoinHandle<()>,
    events: mpsc::Receiver<Event>,
}

impl FileSourceFixture {
    fn on(path: &str) -> Self {
        let dir = TempDir::new().unwrap();
        let world = world_in(dir.path());
        let (sender, events) = mpsc::channel(8);
        // A poll so slow that only hints can cause the observed changes.
        let slow = Duration::from_secs(3600);
        let task = tokio::spawn(run(world.clone(), dir.path().join(path), slow, sender));
        FileSourceFixture { dir, world, task, events }
    }

    fn write(&self, path: &str, text: &str) {
        fs::write(self.dir.path().join(path), text).unwrap();
    }

    async fn next(&mut self) -> String {
        let event = timeout(Duration::from_secs(10), self.events.recv()).await.expect("a set of pods in time");
        match event {
            Some(Event::Config { source: Source::File, pods }) => names(&pods),
            other => panic!("{other:?}"),
        }
    }

    /// Waits for this many recorded warnings; returns them without the directory's name.
    async fn warnings(&self, count: usize) -> String {
        for _ in 0..200 {
            let recorded = self.world.events.since(0);
            if recorded.len() >= count {
                let dir = self.dir.path().to_string_lossy().into_owned();
                let line = |event: &crate::event_log::LoggedEvent| {
                    let text = format!("{:?} {} {}", event.record.about, event.record.reason, event.record.message);
                    text.replace(&dir, "DIR")
                };
                let mut lines: Vec<String> = recorded.iter().map(line).collect();
                lines.sort();
                return lines.join("\n");
            }
            sleep(Duration::from_millis(25)).await;
        }
        panic!("not {count} warnings: {:?}", self.world.events.since(0));
    }

    async fn end(self) {
        self.task.abort();
        assert!(self.task.await.unwrap_err().is_cancelled());
    }
}

#[tokio::test]
async fn files_come_change_and_go() {
    let mut source = FileSourceFixture::on("");
    assert_eq!(source.next().await, "");
    source.write("web.yaml", &manifest("web", "nginx:1"));
    assert_eq!(source.next().await, "web-n1=nginx:1");
    source.write(".web.yaml.swp", &manifest("swap", "nginx:1"));
    source.write("web.yaml", &manifest("web", "nginx:2"));
    assert_eq!(source.next().await, "web-n1=nginx:2");
    fs::rename(source.dir.path().join("web.yaml"), source.dir.path().join("other.yaml")).unwrap();
    assert_eq!(source.next().await, "web-n1=nginx:2");
    fs::remove_file(source.dir.path().join("other.yaml")).unwrap();
    assert_eq!(source.next().await, "");
    source.end().await;
}

#[tokio::test]
async fn a_directory_that_comes_later_is_found() {
    let mut source = FileSourceFixture::on("manifests");
    assert_eq!(source.next().await, "");
    fs::create_dir(source.dir.path().join("manifests")).unwrap();
    source.write("manifests/web.yaml", &manifest("web", "nginx:1"));
    assert_eq!(source.next().await, "web-n1=nginx:1");
    fs::remove_dir_all(source.dir.path().join("manifests")).unwrap();
    assert_eq!(source.next().await, "");
    fs::create_dir(source.dir.path().join("manifests")).unwrap();
    source.write("manifests/web.yaml", &manifest("web", "nginx:2"));
    assert_eq!(source.next().await, "web-n1=nginx:2");
    source.end().await;
}

#[tokio::test]
async fn a_single_file_is_a_source_too() {
    let mut source = FileSourceFixture::on("web.yaml");
    assert_eq!(source.next().await, "");
    source.write("web.yaml", &manifest("web", "nginx:1"));
    assert_eq!(source.next().await, "web-n1=nginx:1");
    fs::write(source.dir.path().join("new"), manifest("web", "nginx:2")).unwrap();
    fs::rename(source.dir.path().join("new"), source.dir.path().join("web.yaml")).unwrap();
    assert_eq!(source.next().await, "web-n1=nginx:2");
    source.end().await;
}

#[tokio::test]
async fn special_files_among_manifests_are_reported_and_skipped() {
    let mut source = FileSourceFixture::on("manifests");
    let dir = source.dir.path().to_owned();
    assert_eq!(source.next().await, "");
    let staged = dir.join("staged");
    fs::create_dir(&staged).unwrap();
    fs::create_dir(staged.join("directory")).unwrap();
    assert!(Command::new("mkfifo").arg(staged.join("fifo")).status().unwrap().success());
    fs::File::create(staged.join("large")).unwrap().set_len(20 << 20).unwrap();
    fs::write(staged.join("broken"), "a: [").unwrap();
    fs::write(staged.join("web"), manifest("web", "nginx:1")).unwrap();
    fs::write(dir.join("elsewhere"), manifest("linked", "nginx:2")).unwrap();
    symlink(dir.join("elsewhere"), staged.join("link")).unwrap();
    symlink(dir.join("nowhere"), staged.join("dangling")).unwrap();
    fs::rename(&staged, dir.join("manifests")).unwrap();

    assert_eq!(source.next().await, "linked-n1=nginx:2 web-n1=nginx:1");
    assert_snapshot!(source.warnings(5).await, @r#"
    Manifest("DIR/manifests/broken") FailedValidation not YAML: unclosed bracket '[' at line 1, column 4
    Manifest("DIR/manifests/dangling") FailedValidation it is a link that leads nowhere
    Manifest("DIR/manifests/directory") FailedValidation it is a directory; manifests are not looked for inside
    Manifest("DIR/manifests/fifo") FailedValidation it is a Fifo, not a regular file
    Manifest("DIR/manifests/large") FailedValidation it is larger than the limit of 10485760 bytes
    "#);
    source.end().await;
}
