//! Inspection, queue, pulls and retries of images over virtual time.

use std::time::Duration;

use crate::{
    effect::{EffectError, ErrorKind, ImageFacts, InvolvedObject, Reason},
    id::{PodRef, PodUid},
    images::{ImageAvailability, ImageRequest, ImageTarget, Images, PullPolicy},
    op::{ImageOp, Op},
    settings::Settings,
    test_support::later,
};

/// Drives the images of some pods and logs the steps.
struct ImagesFixture {
    images: Images,
    settings: Settings,
    at_secs: u64,
    /// Operations in flight, oldest first.
    under_way: Vec<(String, Op)>,
    log: Vec<String>,
}

impl ImagesFixture {
    fn new() -> Self {
        let settings = Settings::for_node("node");
        ImagesFixture { images: Images::default(), settings, at_secs: 0, under_way: Vec::new(), log: Vec::new() }
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
        self.log.push(match &op {
            Op::Image(ImageOp::Inspect { image, .. }) => format!("{uid} looks for {image}"),
            Op::Image(ImageOp::Pull { image, .. }) => format!("{uid} pulls {image}"),
            other => panic!("images never ask for {other:?}"),
        });
        self.under_way.push((uid.to_owned(), op));
    }

    fn pull(&mut self) {
        let steps = self.images.plan(&self.settings, later(self.at_secs));
        if let Some(moment) = self.images.pulls_at {
            self.log.push(format!("wait {:?}", moment.since(later(self.at_secs).uptime)));
        }
        for (uid, _, op) in steps.ops {
            self.send(uid.as_str(), op);
        }
    }

    /// The oldest operation finishes.
    fn answer(&mut self, result: &Result<Option<ImageFacts>, EffectError>) {
        let (uid, _) = self.under_way.remove(0);
        let steps = self.images.done(&PodUid::new(uid.as_str()), &container(), result, later(self.at_secs));
        for event in steps.events {
            self.log.push(format!("{uid} {}: {}", event.reason, event.message));
        }
        for (uid, _, op) in steps.ops {
            self.send(uid.as_str(), op);
        }
        self.pull();
    }

    fn pass(&mut self, secs: u64) {
        self.at_secs += secs;
        let (_, events) = self.images.due(later(self.at_secs));
        self.log.extend(events.into_iter().map(|event| format!("{}: {}", event.reason, event.message)));
    }

    fn reason(&self, uid: &str) -> &str {
        self.images.waiting(&PodUid::new(uid), &container()).map_or("", |waiting| waiting.reason.as_str())
    }

    fn is_ready(&self, uid: &str) -> bool {
        let known = self.images.requests[&(PodUid::new(uid), container())].request.clone();
        self.is_ready_for(uid, &known)
    }

    fn is_ready_for(&self, uid: &str, request: &ImageRequest) -> bool {
        matches!(self.images.readiness(&PodUid::new(uid), request), ImageAvailability::Ready(_))
    }

    fn told(&mut self) -> Vec<String> {
        std::mem::take(&mut self.log)
    }
}

fn request(image: &str, policy: PullPolicy) -> ImageRequest {
    ImageRequest { target: container(), image: image.to_owned(), policy, pull_secrets: Vec::new() }
}

fn container() -> ImageTarget {
    ImageTarget::Container("c".to_owned())
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
        let mut fixture = ImagesFixture::new();
        fixture.request("p", "i:1", policy);
        fixture.answer(&present());
        assert!(fixture.is_ready("p"), "{policy:?}");
        assert_eq!(
            fixture.told(),
            [
                "p looks for i:1",
                "p Pulled: Container image \"i:1\" already present on machine and can be accessed by the pod"
            ]
        );
    }
}

#[test]
fn always_pulls_present_images_and_never_rejects_missing_ones() {
    let mut fixture = ImagesFixture::new();
    fixture.request("p", "i:1", PullPolicy::Always);
    fixture.answer(&present());
    assert_eq!(fixture.told(), ["p looks for i:1", "p pulls i:1"]);

    let mut fixture = ImagesFixture::new();
    fixture.request("p", "i:1", PullPolicy::Never);
    fixture.answer(&Ok(None));
    assert_eq!(fixture.reason("p"), "ErrImageNeverPull");
    assert_eq!(
        fixture.told()[1],
        "p ErrImageNeverPull: Container image \"i:1\" is not present with pull policy of Never"
    );
}

#[test]
fn a_pulled_image_is_described_and_ready() {
    let mut fixture = ImagesFixture::new();
    fixture.request("p", "i:1", PullPolicy::IfNotPresent);
    fixture.answer(&Ok(None));
    fixture.at_secs += 2;
    fixture.answer(&Ok(None));
    fixture.answer(&present());
    assert!(fixture.is_ready("p"));
    assert_eq!(
        fixture.told()[3],
        "p Pulled: Successfully pulled image \"i:1\" in 2s (2s including waiting). Image size: 7 bytes."
    );
}

#[test]
fn failed_pull_shows_error_then_back_off_then_retries() {
    let mut fixture = ImagesFixture::new();
    for delay in [10, 20, 40, 80, 160, 300, 300] {
        fixture.request("p", "i:1", PullPolicy::IfNotPresent);
        fixture.answer(&Ok(None));
        fixture.answer(&refused());
        assert_eq!(fixture.reason("p"), "ErrImagePull");
        fixture.pass(3);
        assert_eq!(fixture.reason("p"), "ImagePullBackOff");
        let message = &fixture.images.waiting(&PodUid::new("p"), &container()).unwrap().message;
        assert_eq!(message, "Back-off pulling image \"i:1\": ErrImagePull: no such host");
        fixture.told();
        fixture.pass(delay - 4);
        fixture.request("p", "i:1", PullPolicy::IfNotPresent);
        assert_eq!(fixture.told(), [""; 0], "a try before {delay} s are over");
        fixture.pass(1);
    }
}

#[test]
fn pulls_are_serial_and_a_removed_pod_leaves_the_queue() {
    let mut fixture = ImagesFixture::new();
    for uid in ["p", "q", "r"] {
        fixture.request(uid, "i:1", PullPolicy::IfNotPresent);
    }
    for _ in 0..3 {
        fixture.answer(&Ok(None));
    }
    assert_eq!(fixture.told()[3..], ["p pulls i:1"]);
    fixture.images.forget_pod(&PodUid::new("q"));
    fixture.images.forget_pod(&PodUid::new("p"));
    fixture.pull();
    assert_eq!(fixture.told(), ["r pulls i:1"]);
}

#[test]
fn parallel_pulls_stop_at_their_limit() {
    let mut fixture = ImagesFixture::new();
    fixture.settings.max_parallel_pulls = Some(2);
    for uid in ["p", "q", "r"] {
        fixture.request(uid, "i:1", PullPolicy::IfNotPresent);
    }
    for _ in 0..3 {
        fixture.answer(&Ok(None));
    }
    assert_eq!(fixture.told()[3..], ["p pulls i:1", "q pulls i:1"]);
}

#[test]
fn pulls_over_the_registrys_rate_wait() {
    let mut fixture = ImagesFixture::new();
    fixture.settings.max_parallel_pulls = None;
    fixture.settings.registry_pull_qps = 2;
    fixture.settings.registry_burst = 3;
    for uid in ["p", "q", "r", "s"] {
        fixture.request(uid, "i:1", PullPolicy::IfNotPresent);
    }
    for _ in 0..4 {
        fixture.answer(&Ok(None));
    }
    let half_a_second = format!("wait {:?}", Duration::from_millis(500));
    assert_eq!(fixture.told()[4..], ["p pulls i:1", "q pulls i:1", "r pulls i:1", &half_a_second]);
}

#[test]
fn ready_image_does_not_satisfy_another_request() {
    let mut fixture = ImagesFixture::new();
    fixture.request("p", "i:1", PullPolicy::IfNotPresent);
    fixture.answer(&present());
    assert!(fixture.is_ready("p"));
    assert!(!fixture.is_ready_for("p", &request("i:2", PullPolicy::IfNotPresent)));
    fixture.request("p", "i:2", PullPolicy::IfNotPresent);
    assert!(!fixture.is_ready("p"));
    fixture.answer(&present());
    assert!(fixture.is_ready_for("p", &request("i:2", PullPolicy::IfNotPresent)));
}

#[test]
fn new_image_cancels_the_pull_of_the_old_one() {
    let mut fixture = ImagesFixture::new();
    fixture.request("p", "i:1", PullPolicy::Always);
    fixture.answer(&present());
    assert_eq!(fixture.told(), ["p looks for i:1", "p pulls i:1"]);
    fixture.request("p", "i:2", PullPolicy::Always);
    fixture.answer(&present());
    assert_eq!(fixture.told(), ["p looks for i:2", "p pulls i:2"]);
    assert_eq!(fixture.under_way.len(), 1, "the old pull goes on");
}

#[test]
fn new_request_of_a_volume_respects_the_back_off_of_its_image() {
    let mut images = Images::default();
    let target = ImageTarget::Volume("v".to_owned());
    let request = ImageRequest { target: target.clone(), ..request("i:1", PullPolicy::IfNotPresent) };
    let (uid, settings) = (PodUid::new("p"), Settings::for_node("node"));
    let missing = |images: &mut Images, at_secs| {
        images.ensure_image(&pod("p"), &request, later(at_secs)).expect("it was not asked for yet");
        let steps = images.done(&uid, &target, &Ok(None), later(at_secs));
        (steps.events, images.plan(&settings, later(at_secs)).ops.len())
    };
    assert_eq!(missing(&mut images, 0).1, 1, "it is pulled");
    let failed = images.done(&uid, &target, &refused(), later(0));
    let involved: Vec<_> = failed.events.iter().map(|event| (event.about.clone(), event.message.as_str())).collect();
    let about = InvolvedObject::Pod(pod("p"));
    assert_eq!(involved, [(about, "Failed to pull image \"i:1\": no such host")], "containers have their own events");
    images.forget_volumes(&uid);
    assert_eq!(images.waiting(&uid, &target), None);
    let (events, pulls) = missing(&mut images, 5);
    let messages: Vec<_> = events.iter().map(|event| event.message.as_str()).collect();
    assert_eq!((messages, pulls), (vec!["Back-off pulling image \"i:1\""], 0));
    assert_eq!(images.next_wakeup(later(5)), Some(later(10).uptime));
    images.forget_volumes(&uid);
    assert_eq!(missing(&mut images, 10).1, 1);
    images.forget_volumes(&uid);
    assert!(images.is_working_for(&uid), "a pull under way ends");
}
