//! Image presence and pulls: which image may be pulled now.
//!
//! Owns: pull policies, the pull queue, registry QPS, back-off per pod and image, and the texts about them.
//! Never: pulls; `Agent` turns its steps into effects.
//! Upstream: `images/image_manager.go`, `images/puller.go`.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use crate::{
    config::GoDuration,
    effect::{EffectError, ErrorKind, EventRecord, ImageFacts, Reason, Severity},
    event_reasons,
    id::{PodRef, PodUid},
    op::{ImageOp, Op},
    pod::status::Waiting,
    settings::Settings,
    time::{Now, Uptime},
};

pub mod keyring;
mod request;

pub use request::{ImageRequest, ImageTarget, PullPolicy};

const BACKOFF_FIRST: Duration = Duration::from_secs(10);
const BACKOFF_MAX: Duration = Duration::from_secs(300);
/// Twice the longest wait.
const BACKOFF_EXPIRES_AFTER: Duration = Duration::from_secs(600);
/// How long `ErrImagePull` is shown before it becomes `ImagePullBackOff`.
const ERROR_SHOWN: Duration = Duration::from_secs(3);
/// Interval of inspections of an image that may not be pulled, or whose inspection failed.
const RECHECK: Duration = Duration::from_secs(10);

type Key = (PodUid, ImageTarget);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageAvailability<'a> {
    Ready(&'a ImageFacts),
    NotReady,
}

/// The images that containers wait for; one entry from the first request until the start. Entries of image volumes stay until
/// no container of their pod waits for a start.
#[derive(Clone, Debug, Default)]
pub struct Images {
    requests: BTreeMap<Key, Ensure>,
    queue: VecDeque<Key>,
    backoffs: BTreeMap<(PodUid, String), Backoff>,
    tokens: PullRateLimiter,
    /// When the next queued pull may start, if it waits for the rate limit.
    pulls_at: Option<Uptime>,
}

#[derive(Clone, Debug)]
struct Ensure {
    pod: PodRef,
    request: ImageRequest,
    state: PullState,
    /// The waiting state in the container's status meanwhile.
    waiting: Option<Waiting>,
}

#[derive(Clone, Debug, PartialEq)]
enum PullState {
    /// Nothing is in flight; inspected again at this time.
    Idle {
        retry_at: Uptime,
    },
    Inspecting,
    Queued {
        since: Uptime,
    },
    Pulling {
        since: Uptime,
        queued_at: Uptime,
    },
    /// Pulled; its ID, size and user are being inspected.
    Describing {
        pulled: Pulled,
    },
    Ready(ImageFacts),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pulled {
    pull_took: Duration,
    with_wait: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Backoff {
    delay: Duration,
    failed_at: Uptime,
    error: String,
}

impl Backoff {
    fn retry_at(&self) -> Uptime {
        self.failed_at + self.delay
    }
}

/// What the agent has to do for images.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ImageSteps {
    pub ops: Vec<(PodUid, ImageTarget, Op)>,
    pub events: Vec<EventRecord>,
}

impl Images {
    /// Of exactly the requested image: an image that was ready before an edit of the pod does not count.
    pub fn readiness(&self, uid: &PodUid, request: &ImageRequest) -> ImageAvailability<'_> {
        let known = self.requests.get(&(uid.clone(), request.target.clone())).filter(|known| known.request == *request);
        match known.map(|ensure| &ensure.state) {
            Some(PullState::Ready(facts)) => ImageAvailability::Ready(facts),
            Some(
                PullState::Idle { .. }
                | PullState::Inspecting
                | PullState::Queued { .. }
                | PullState::Pulling { .. }
                | PullState::Describing { .. },
            )
            | None => ImageAvailability::NotReady,
        }
    }

    /// A container waits for the image of this ID or name, or for its own start with it.
    pub fn needs(&self, image: &str) -> bool {
        self.requests.values().any(|ensure| {
            let is_ready = matches!(&ensure.state, PullState::Ready(facts) if facts.id == image);
            is_ready || ensure.request.image == image
        })
    }

    /// The waiting state of a container that waits for this image; `None` until something has failed.
    pub fn waiting(&self, uid: &PodUid, target: &ImageTarget) -> Option<&Waiting> {
        self.requests.get(&(uid.clone(), target.clone())).and_then(|ensure| ensure.waiting.as_ref())
    }

    /// One text per image that is not ready, with its next retry.
    pub fn progress(&self, uid: &PodUid) -> Vec<ImageProgress<'_>> {
        self.of_pod(uid).map(|(target, ensure)| ImageProgress::of(target, ensure)).collect()
    }

    /// An image is being inspected or pulled, or is next in the queue.
    pub fn is_working_for(&self, uid: &PodUid) -> bool {
        self.of_pod(uid).any(|(_, ensure)| !matches!(ensure.state, PullState::Idle { .. } | PullState::Ready(_)))
    }

    fn of_pod(&self, uid: &PodUid) -> impl Iterator<Item = (&ImageTarget, &Ensure)> {
        let from =
            self.requests.range((uid.clone(), ImageTarget::FIRST)..).take_while(move |((owner, _), _)| owner == uid);
        from.map(|((_, target), ensure)| (target, ensure))
    }

    /// The container's image or policy changed: drops the state of the old request. Returns whether there was one.
    pub fn supersede(&mut self, uid: &PodUid, request: &ImageRequest) -> bool {
        let known = self.requests.get(&(uid.clone(), request.target.clone()));
        let is_superseded = known.is_some_and(|known| known.request != *request);
        if is_superseded {
            self.forget(uid, &request.target);
        }
        is_superseded
    }

    /// A container requests its image: inspects it now, unless that is in flight or in back-off.
    pub fn ensure_image(&mut self, pod: &PodRef, request: &ImageRequest, now: Now) -> Option<Op> {
        let key = (pod.uid.clone(), request.target.clone());
        let image = request.image.clone();
        let ensure = self.requests.entry(key).or_insert_with(|| Ensure {
            pod: pod.clone(),
            request: request.clone(),
            state: PullState::Idle { retry_at: now.uptime },
            waiting: None,
        });
        debug_assert_eq!(ensure.request, *request, "another wish supersedes the old one first");
        let PullState::Idle { retry_at } = ensure.state else { return None };
        if retry_at > now.uptime {
            return None;
        }
        ensure.state = PullState::Inspecting;
        Some(Op::Image(ImageOp::Inspect { pod: pod.clone(), image }))
    }

    /// The container was started, or is no longer desired: a later start requests its image again.
    pub fn forget(&mut self, uid: &PodUid, target: &ImageTarget) {
        let key = (uid.clone(), target.clone());
        self.requests.remove(&key);
        self.queue.retain(|queued| *queued != key);
    }

    /// No container of the pod is about to start: a later start requests the images of its volumes again. Pulls under way end.
    pub fn forget_volumes(&mut self, uid: &PodUid) {
        let is_settled = |ensure: &Ensure| matches!(ensure.state, PullState::Idle { .. } | PullState::Ready(_));
        let volumes = self.of_pod(uid).filter(|(target, _)| matches!(target, ImageTarget::Volume(_)));
        let settled = volumes.filter(|(_, ensure)| is_settled(ensure)).map(|(target, _)| target.clone());
        for target in settled.collect::<Vec<_>>() {
            self.forget(uid, &target);
        }
    }

    /// Drops the pod's requests, queue entries and back-offs.
    pub fn forget_pod(&mut self, uid: &PodUid) {
        self.requests.retain(|(owner, _), _| owner != uid);
        self.backoffs.retain(|(owner, _), _| owner != uid);
        self.queue.retain(|(owner, _)| owner != uid);
    }

    /// Every pod with an entry.
    pub fn uids(&self) -> impl Iterator<Item = &PodUid> {
        self.requests.keys().chain(&self.queue).map(|(uid, _)| uid).chain(self.backoffs.keys().map(|(uid, _)| uid))
    }

    /// An inspection or a pull for this target has finished.
    pub fn done(
        &mut self,
        uid: &PodUid,
        target: &ImageTarget,
        result: &Result<Option<ImageFacts>, EffectError>,
        now: Now,
    ) -> ImageSteps {
        let key = (uid.clone(), target.clone());
        let mut steps = ImageSteps::default();
        let Some(ensure) = self.requests.get_mut(&key) else { return steps };
        match ensure.state.clone() {
            PullState::Inspecting => self.inspected(&key, result, &mut steps, now),
            PullState::Pulling { since, queued_at } => match result {
                Ok(_) => {
                    let (pull_took, with_wait) = (now.uptime.since(since), now.uptime.since(queued_at));
                    ensure.state = PullState::Describing { pulled: Pulled { pull_took, with_wait } };
                    let op =
                        Op::Image(ImageOp::Inspect { pod: ensure.pod.clone(), image: ensure.request.image.clone() });
                    steps.ops.push((key.0.clone(), key.1.clone(), op));
                }
                Err(error) => self.pull_failed(&key, error, &mut steps, now),
            },
            PullState::Describing { pulled } => self.described(&key, result, pulled, &mut steps, now),
            PullState::Idle { .. } | PullState::Queued { .. } | PullState::Ready(_) => {}
        }
        steps
    }

    /// Pulls that may start now.
    pub fn plan(&mut self, settings: &Settings, now: Now) -> ImageSteps {
        let mut steps = ImageSteps::default();
        self.pulls_at = None;
        let mut pulling =
            self.requests.values().filter(|ensure| matches!(ensure.state, PullState::Pulling { .. })).count();
        while let Some(key) = self.queue.front() {
            if settings.max_parallel_pulls.is_some_and(|max| pulling >= max as usize) {
                return steps;
            }
            if let Err(wait_until) = self.tokens.take(settings, now.uptime) {
                self.pulls_at = Some(wait_until);
                return steps;
            }
            let ensure = self.requests.get_mut(key).expect("a queued image is requested");
            if let PullState::Queued { since } = ensure.state {
                ensure.state = PullState::Pulling { since: now.uptime, queued_at: since };
            }
            let image = ensure.request.image.clone();
            steps.events.push(ensure.event(
                Severity::Normal,
                event_reasons::PULLING_IMAGE,
                format!("Pulling image \"{image}\""),
            ));
            let op = Op::Image(ImageOp::Pull {
                pod: ensure.pod.clone(),
                image,
                secrets: ensure.request.pull_secrets.clone(),
            });
            steps.ops.push((key.0.clone(), key.1.clone(), op));
            self.queue.pop_front();
            pulling += 1;
        }
        steps
    }

    /// Applies the time: turns `ErrImagePull` into `ImagePullBackOff`, and returns the pods whose next inspection is due.
    pub fn due(&mut self, now: Now) -> (Vec<PodUid>, Vec<EventRecord>) {
        let mut touched = Vec::new();
        let mut events = Vec::new();
        for ((uid, _), ensure) in &mut self.requests {
            let PullState::Idle { retry_at } = ensure.state else { continue };
            if retry_at <= now.uptime {
                touched.push(uid.clone());
                continue;
            }
            let Some(backoff) = self.backoffs.get(&(uid.clone(), ensure.request.image.clone())) else { continue };
            let is_shown = ensure.waiting.as_ref().is_some_and(|waiting| waiting.reason == Reason::ImagePullBackOff);
            if !is_shown && backoff.failed_at + ERROR_SHOWN <= now.uptime {
                events.extend(ensure.back_off(backoff));
                touched.push(uid.clone());
            }
        }
        (touched, events)
    }

    /// When the next change by time alone is due.
    pub fn next_wakeup(&self, now: Now) -> Option<Uptime> {
        let moments = self.requests.iter().flat_map(|((uid, _), ensure)| {
            let PullState::Idle { retry_at } = ensure.state else { return [None, None] };
            let backoff = self.backoffs.get(&(uid.clone(), ensure.request.image.clone()));
            [Some(retry_at), backoff.map(|backoff| backoff.failed_at + ERROR_SHOWN)]
        });
        moments.flatten().chain(self.pulls_at).filter(|moment| *moment > now.uptime).min()
    }

    fn inspected(
        &mut self,
        key: &Key,
        result: &Result<Option<ImageFacts>, EffectError>,
        steps: &mut ImageSteps,
        now: Now,
    ) {
        let ensure = self.requests.get_mut(key).expect("the caller found it");
        let image = ensure.request.image.clone();
        match (result, ensure.request.policy) {
            (Err(error), _) => {
                let reason = match &error.kind {
                    ErrorKind::Reject(reason) => *reason,
                    ErrorKind::Retry
                    | ErrorKind::Uncertain
                    | ErrorKind::FailedByDriver
                    | ErrorKind::FileSystemLate
                    | ErrorKind::Unavailable
                    | ErrorKind::TimedOut
                    | ErrorKind::MissingObject
                    | ErrorKind::Refused
                    | ErrorKind::Gone => Reason::ImageInspectError,
                };
                let message = format!("Failed to inspect image \"{image}\": {}", error.message);
                steps.events.push(ensure.event(
                    Severity::Warning,
                    event_reasons::FAILED_TO_INSPECT_IMAGE,
                    message.clone(),
                ));
                ensure.set_back(reason, message, now.uptime + RECHECK);
            }
            (Ok(Some(facts)), PullPolicy::IfNotPresent | PullPolicy::Never) => {
                let message =
                    format!("Container image \"{image}\" already present on machine and can be accessed by the pod");
                steps.events.push(ensure.event(Severity::Normal, event_reasons::PULLED_IMAGE, message));
                ensure.state = PullState::Ready(facts.clone());
                ensure.waiting = None;
            }
            (Ok(None), PullPolicy::Never) => {
                let message = format!("Container image \"{image}\" is not present with pull policy of Never");
                if ensure.waiting.is_none() {
                    steps.events.push(ensure.event(
                        Severity::Warning,
                        event_reasons::ERR_IMAGE_NEVER_PULL_POLICY,
                        message.clone(),
                    ));
                }
                ensure.set_back(Reason::ErrImageNeverPull, message, now.uptime + RECHECK);
            }
            (Ok(None), PullPolicy::IfNotPresent) | (Ok(_), PullPolicy::Always) => {
                // The request may be newer than the last failure of its image.
                match self.backoffs.get(&(key.0.clone(), image)).filter(|backoff| backoff.retry_at() > now.uptime) {
                    Some(backoff) => {
                        steps.events.extend(ensure.back_off(backoff));
                        ensure.state = PullState::Idle { retry_at: backoff.retry_at() };
                    }
                    None => {
                        ensure.state = PullState::Queued { since: now.uptime };
                        self.queue.push_back(key.clone());
                    }
                }
            }
        }
    }

    fn pull_failed(&mut self, key: &Key, error: &EffectError, steps: &mut ImageSteps, now: Now) {
        let ensure = self.requests.get_mut(key).expect("the caller found it");
        let image = ensure.request.image.clone();
        let reason = match &error.kind {
            ErrorKind::Reject(reason) => *reason,
            ErrorKind::Retry
            | ErrorKind::Uncertain
            | ErrorKind::FailedByDriver
            | ErrorKind::FileSystemLate
            | ErrorKind::Unavailable
            | ErrorKind::TimedOut
            | ErrorKind::MissingObject
            | ErrorKind::Refused
            | ErrorKind::Gone => Reason::ErrImagePull,
        };
        let said = format!("Failed to pull image \"{image}\": {}", error.message);
        steps.events.push(ensure.event(Severity::Warning, event_reasons::FAILED_TO_PULL_IMAGE, said));
        steps.events.extend(ensure.error_event(reason));
        let backoff_key = (key.0.clone(), image);
        let delay = match self.backoffs.get(&backoff_key) {
            Some(known) if now.uptime.since(known.failed_at) <= BACKOFF_EXPIRES_AFTER => {
                known.delay.saturating_mul(2).min(BACKOFF_MAX)
            }
            Some(_) | None => BACKOFF_FIRST,
        };
        let error_text = format!("{}: {}", reason.as_str(), error.message);
        ensure.set_back(reason, error.message.clone(), now.uptime + delay);
        self.backoffs.insert(backoff_key, Backoff { delay, failed_at: now.uptime, error: error_text });
    }

    fn described(
        &mut self,
        key: &Key,
        result: &Result<Option<ImageFacts>, EffectError>,
        pulled: Pulled,
        steps: &mut ImageSteps,
        now: Now,
    ) {
        let ensure = self.requests.get_mut(key).expect("the caller found it");
        let Ok(Some(facts)) = result else {
            // Pulled and gone again, or the inspection failed: start over.
            ensure.state = PullState::Idle { retry_at: now.uptime + RECHECK };
            return;
        };
        let message = format!(
            "Successfully pulled image \"{}\" in {} ({} including waiting). Image size: {} bytes.",
            ensure.request.image,
            GoDuration::from(whole_millis(pulled.pull_took)),
            GoDuration::from(whole_millis(pulled.with_wait)),
            facts.size_bytes,
        );
        steps.events.push(ensure.event(Severity::Normal, event_reasons::PULLED_IMAGE, message));
        ensure.state = PullState::Ready(facts.clone());
        ensure.waiting = None;
        self.backoffs.remove(&(key.0.clone(), ensure.request.image.clone()));
    }
}

impl Ensure {
    /// Shows that the next pull is delayed.
    fn back_off(&mut self, backoff: &Backoff) -> Vec<EventRecord> {
        let reason = Reason::ImagePullBackOff;
        let said = format!("Back-off pulling image \"{}\"", self.request.image);
        self.waiting = Some(Waiting { reason, message: format!("{said}: {}", backoff.error) });
        let event = self.event(Severity::Normal, event_reasons::BACK_OFF_PULL_IMAGE, said);
        [event].into_iter().chain(self.error_event(reason)).collect()
    }

    fn set_back(&mut self, reason: Reason, message: String, retry_at: Uptime) {
        self.state = PullState::Idle { retry_at };
        self.waiting = Some(Waiting { reason, message });
    }

    /// Of the container. Containers that mount an image volume have theirs when they are planned.
    fn error_event(&self, reason: Reason) -> Option<EventRecord> {
        let message = format!("Error: {}", reason.as_str());
        match self.request.target {
            ImageTarget::Container(_) => {
                Some(self.event(Severity::Warning, event_reasons::FAILED_TO_PULL_IMAGE, message))
            }
            ImageTarget::Volume(_) => None,
        }
    }

    fn event(&self, severity: Severity, reason: &str, message: String) -> EventRecord {
        EventRecord::new(self.request.target.involved_object(&self.pod), severity, reason, message)
    }
}

/// The text of `explain` about one image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageProgress<'a> {
    pub text: String,
    pub since: Option<Uptime>,
    pub next_retry: Option<Uptime>,
    pub error: Option<&'a str>,
    pub is_ready: bool,
}

impl<'a> ImageProgress<'a> {
    fn of(target: &ImageTarget, ensure: &'a Ensure) -> Self {
        let image = &ensure.request.image;
        let needed_for = match target {
            ImageTarget::Container(name) => name.clone(),
            ImageTarget::Volume(_) => target.to_string(),
        };
        let error = ensure.waiting.as_ref().map(|waiting| waiting.message.as_str());
        let (text, since, next_retry) = match &ensure.state {
            PullState::Idle { retry_at } => {
                (format!("{image} (for {needed_for}) is looked for again"), None, Some(*retry_at))
            }
            PullState::Inspecting => (format!("looking for {image} (for {needed_for})"), None, None),
            PullState::Queued { since } => (format!("{image} (for {needed_for}): pull queued"), Some(*since), None),
            PullState::Pulling { since, .. } => (format!("pulling {image} (for {needed_for})"), Some(*since), None),
            PullState::Describing { .. } => (format!("{image} (for {needed_for}) was pulled"), None, None),
            PullState::Ready(_) => (format!("{image} (for {needed_for}) is present"), None, None),
        };
        ImageProgress { text, since, next_retry, error, is_ready: matches!(ensure.state, PullState::Ready(_)) }
    }
}

/// A token bucket: `registryPullQPS` a second, up to `registryBurst` at once. Pulls over the rate wait
/// (upstream fails them with "pull QPS exceeded"; docs/parity.md).
#[derive(Clone, Debug, Default)]
struct PullRateLimiter {
    /// How long the rate takes to make up for the pulls so far, as of `as_of`.
    debt: Duration,
    as_of: Uptime,
}

impl PullRateLimiter {
    /// Takes a token, or returns when there will be one.
    fn take(&mut self, settings: &Settings, now: Uptime) -> Result<(), Uptime> {
        let Some(price) = Duration::from_secs(1).checked_div(settings.registry_pull_qps) else { return Ok(()) };
        let limit = price.saturating_mul(settings.registry_burst.max(1));
        let debt = self.debt.saturating_sub(now.since(self.as_of)).saturating_add(price);
        if debt > limit {
            return Err(now + debt.saturating_sub(limit));
        }
        *self = PullRateLimiter { debt, as_of: now };
        Ok(())
    }
}

fn whole_millis(took: Duration) -> Duration {
    Duration::from_millis(u64::try_from(took.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests;
