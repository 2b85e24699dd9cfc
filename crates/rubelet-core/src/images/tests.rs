//! Inspection, queue, pulls and retries of images over virtual time.

use std::time::Duration;

use crate::{
    effect::{EffectError, ErrorKind, ImageFacts, Reason},
    id::{PodRef, PodUid},
    images::{ImageAvailability, ImageRequest, Images, PullPolicy},
    op::{ImageOp, Op},
    settings::Settings,
    test_support::later,
};

/// Drives the images of some pods and logs the steps.
struct Story {
    images: Images,
    settings: Settings,
    at_secs: u64,
    /// Operations in flight, oldest first.
    under_way: Vec<(String, Op)>,
    diary: Vec<String>,
}

impl Story {
    fn new() -> Self {
        let settings = Settings::for_node("node");
        Story { images: Images::default(), settings, at_secs: 0, under_way: Vec::new(), diary: Vec::new() }
    }

    fn request(&mut self, uid: &str, image: &str, policy: PullPolicy) {
        let request = request(image, policy);
        if self.images.supersede(&PodUid::new(uid), &request) {
            self.under_way.retain(|(owner, _)| owner != uid);
        }
        if let Some(op) = self.images.ensure_image(&pod(uid), &request, later(self.at_secs)) {
            self.send(uid, op);
        }
        self.pull();
    }

    fn send(&mut self, uid: &str, op: Op) {
        self.diary.push(match &op {
            Op::Image(ImageOp::Inspect { image, .. }) => format!("{uid} looks for {image}"),
            Op::Image(ImageOp::Pull { image, .. }) => format!("{uid} pulls {image}"),
            other => panic!("images never ask for {other:?}"),
        });
        self.under_way.push((uid.to_owned(), op));
    }

    fn pull(&mut self) {
        let steps = self.images.plan(&self.settings, later(self.at_secs));
        if let Some(moment) = self.images.pulls_at {
            self.diary.push(format!("wait {:?}", moment.since(later(self.at_secs).uptime)));
        }
        for (uid, _, op) in steps.ops {
            self.send(uid.as_str(), op);
        }
    }

    /// The oldest operation finishes.
    fn answer(&mut self, result: &Result<Option<ImageFacts>, EffectError>) {
        let (uid, _) = self.under_way.remove(0);
        let steps = self.images.done(&PodUid::new(uid.as_str()), "c", result, later(self.at_secs));
        for event in steps.events {
            self.diary.push(format!("{uid} {}: {}", event.reason, event.message));
        }
        for (uid, _, op) in steps.ops {
            self.send(uid.as_str(), op);
        }
        self.pull();
    }

    fn pass(&mut self, secs: u64) {
        self.at_secs += secs;
        let (_, events) = self.images.due(later(self.at_secs));
        self.diary.extend(events.into_iter().map(|event| format!("{}: {}", event.reason, event.message)));
    }

    fn reason(&self, uid: &str) -> &str {
        self.images.waiting(&PodUid::new(uid), "c").map_or("", |waiting| waiting.reason.as_str())
    }

    fn is_ready(&self, uid: &str) -> bool {
        let known = self.images.requests[&(PodUid::new(uid), "c".to_owned())].request.clone();
        self.is_ready_for(uid, &known)
    }

    fn is_ready_for(&self, uid: &str, request: &ImageRequest) -> bool {
        matches!(self.images.readiness(&PodUid::new(uid), request), ImageAvailability::Ready(_))
    }

    fn told(&mut self) -> Vec<String> {
        std::mem::take(&mut self.diary)
    }
}

fn request(image: &str, policy: PullPolicy) -> ImageRequest {
    ImageRequest { container: "c".to_owned(), image: image.to_owned(), policy, pull_secrets: Vec::new() }
}

fn pod(uid: &str) -> PodRef {
    PodRef { uid: PodUid::new(uid), namespace: "default".into(), name: uid.into() }
}

fn present() -> Result<Option<ImageFacts>, EffectError> {
    Ok(Some(ImageFacts { id: "sha256:1".to_owned(), size_bytes: 7, ..ImageFacts::default() }))
}

fn refused() -> Result<Option<ImageFacts>, EffectError> {
    Err(EffectError { kind: ErrorKind::Reject(Reason::ErrImagePull), message: "no such host".to_owned() })
}

#[test]
fn an_image_that_is_there_is_not_pulled() {
    for policy in [PullPolicy::IfNotPresent, PullPolicy::Never] {
        let mut story = Story::new();
        story.request("p", "i:1", policy);
        story.answer(&present());
        assert!(story.is_ready("p"), "{policy:?}");
        assert_eq!(
            story.told(),
            [
                "p looks for i:1",
                "p Pulled: Container image \"i:1\" already present on machine and can be accessed by the pod"
            ]
        );
    }
}

#[test]
fn always_pulls_present_images_and_never_rejects_missing_ones() {
    let mut story = Story::new();
    story.request("p", "i:1", PullPolicy::Always);
    story.answer(&present());
    assert_eq!(story.told(), ["p looks for i:1", "p pulls i:1"]);

    let mut story = Story::new();
    story.request("p", "i:1", PullPolicy::Never);
    story.answer(&Ok(None));
    assert_eq!(story.reason("p"), "ErrImageNeverPull");
    assert_eq!(
        story.told()[1],
        "p ErrImageNeverPull: Container image \"i:1\" is not present with pull policy of Never"
    );
}

#[test]
fn a_pulled_image_is_described_and_ready() {
    let mut story = Story::new();
    story.request("p", "i:1", PullPolicy::IfNotPresent);
    story.answer(&Ok(None));
    story.at_secs += 2;
    story.answer(&Ok(None));
    story.answer(&present());
    assert!(story.is_ready("p"));
    assert_eq!(
        story.told()[3],
        "p Pulled: Successfully pulled image \"i:1\" in 2s (2s including waiting). Image size: 7 bytes."
    );
}

#[test]
fn failed_pull_shows_error_then_back_off_then_retries() {
    let mut story = Story::new();
    for delay in [10, 20, 40, 80, 160, 300, 300] {
        story.request("p", "i:1", PullPolicy::IfNotPresent);
        story.answer(&Ok(None));
        story.answer(&refused());
        assert_eq!(story.reason("p"), "ErrImagePull");
        story.pass(3);
        assert_eq!(story.reason("p"), "ImagePullBackOff");
        let message = &story.images.waiting(&PodUid::new("p"), "c").unwrap().message;
        assert_eq!(message, "Back-off pulling image \"i:1\": ErrImagePull: no such host");
        story.told();
        story.pass(delay - 4);
        story.request("p", "i:1", PullPolicy::IfNotPresent);
        assert_eq!(story.told(), [""; 0], "a try before {delay} s are over");
        story.pass(1);
    }
}

#[test]
fn pulls_are_serial_and_a_removed_pod_leaves_the_queue() {
    let mut story = Story::new();
    for uid in ["p", "q", "r"] {
        story.request(uid, "i:1", PullPolicy::IfNotPresent);
    }
    for _ in 0..3 {
        story.answer(&Ok(None));
    }
    assert_eq!(story.told()[3..], ["p pulls i:1"]);
    story.images.forget_pod(&PodUid::new("q"));
    story.images.forget_pod(&PodUid::new("p"));
    story.pull();
    assert_eq!(story.told(), ["r pulls i:1"]);
}

#[test]
fn parallel_pulls_stop_at_their_limit() {
    let mut story = Story::new();
    story.settings.max_parallel_pulls = Some(2);
    for uid in ["p", "q", "r"] {
        story.request(uid, "i:1", PullPolicy::IfNotPresent);
    }
    for _ in 0..3 {
        story.answer(&Ok(None));
    }
    assert_eq!(story.told()[3..], ["p pulls i:1", "q pulls i:1"]);
}

#[test]
fn pulls_over_the_registrys_rate_wait() {
    let mut story = Story::new();
    story.settings.max_parallel_pulls = None;
    story.settings.registry_pull_qps = 2;
    story.settings.registry_burst = 3;
    for uid in ["p", "q", "r", "s"] {
        story.request(uid, "i:1", PullPolicy::IfNotPresent);
    }
    for _ in 0..4 {
        story.answer(&Ok(None));
    }
    let half_a_second = format!("wait {:?}", Duration::from_millis(500));
    assert_eq!(story.told()[4..], ["p pulls i:1", "q pulls i:1", "r pulls i:1", &half_a_second]);
}

#[test]
fn ready_image_does_not_satisfy_another_request() {
    let mut story = Story::new();
    story.request("p", "i:1", PullPolicy::IfNotPresent);
    story.answer(&present());
    assert!(story.is_ready("p"));
    assert!(!story.is_ready_for("p", &request("i:2", PullPolicy::IfNotPresent)));
    story.request("p", "i:2", PullPolicy::IfNotPresent);
    assert!(!story.is_ready("p"));
    story.answer(&present());
    assert!(story.is_ready_for("p", &request("i:2", PullPolicy::IfNotPresent)));
}

#[test]
fn new_image_cancels_the_pull_of_the_old_one() {
    let mut story = Story::new();
    story.request("p", "i:1", PullPolicy::Always);
    story.answer(&present());
    assert_eq!(story.told(), ["p looks for i:1", "p pulls i:1"]);
    story.request("p", "i:2", PullPolicy::Always);
    story.answer(&present());
    assert_eq!(story.told(), ["p looks for i:2", "p pulls i:2"]);
    assert_eq!(story.under_way.len(), 1, "the old pull goes on");
}
