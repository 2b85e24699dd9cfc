//! Garbage collection of images.
//!
//! Owns: when each image was last used, which images are deleted and in which order, and the events about it. Images are
//! deleted one at a time, so that pulls are not held up, and only until the file system has enough room: what a runtime says
//! of an image's size is less than what it frees if the image is unpacked, and more if it shares layers with others.
//! Never: deletes an image that a container has or is about to get.
//! Upstream: `images/image_gc_manager.go`, which forgets the last use of images when it restarts.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    effect::{EffectError, EventRecord, InvolvedObject, Severity},
    event_reasons,
    settings::ImageGcSettings,
    time::{Now, Uptime},
};

/// Interval of looks at the images, as upstream.
const INTERVAL: Duration = Duration::from_secs(300);
/// The shortest time after which a look may delete what an earlier one has found.
const MIN_INTERVAL: Duration = Duration::from_secs(10);
/// After a failed look.
const RETRY: Duration = Duration::from_secs(60);
/// Collections kept for `rubelet node`.
const MAX_RECENT: usize = 20;

/// A look at the images of the node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ImageListing {
    pub images: Vec<ListedImage>,
    /// IDs of images that a container has, running or dead, or a sandbox.
    pub in_use: BTreeSet<String>,
    /// Of the file system that holds images; `None` where the runtime does not report it.
    pub space: Option<Space>,
    /// What an earlier process saved; only with the first look.
    pub remembered: BTreeMap<String, ImageUse>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedImage {
    pub id: String,
    /// Tags and digests.
    pub names: Vec<String>,
    pub size_bytes: u64,
    /// The runtime wants it kept.
    pub is_pinned: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Space {
    pub capacity_bytes: u64,
    pub available_bytes: u64,
}

/// Kept on disk, so that a restart does not make all images equally old.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageUse {
    pub first_seen: Timestamp,
    pub last_used: Option<Timestamp>,
}

#[derive(Clone, Debug, Default)]
pub struct ImageGc {
    images: BTreeMap<String, Image>,
    look_at: Option<Uptime>,
    /// A look is in flight.
    is_looking: bool,
    has_looked: bool,
    collection: Option<Collection>,
    /// The last collection ended above the low threshold, though the sizes of its images were enough.
    is_unfinished: bool,
    /// How many collections in a row did not free enough.
    failures: u32,
    /// An eviction threshold is met; the next look begins a collection.
    reclaims: bool,
    /// The newest last.
    recent: VecDeque<ImageCollection>,
    /// Readers have not seen the last collection.
    has_changed: bool,
}

/// A collection that deleted images or failed, for readers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageCollection {
    /// When it ended.
    pub at: Timestamp,
    pub reason: String,
    pub images: u32,
    pub freed_bytes: u64,
    /// Why it did not free enough.
    pub failure: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Image {
    names: Vec<String>,
    used: ImageUse,
    size_bytes: u64,
    is_pinned: bool,
    is_in_use: bool,
}

/// Images that are being deleted.
#[derive(Clone, Debug)]
struct Collection {
    reason: CollectionReason,
    /// The next first.
    queue: VecDeque<String>,
    /// In flight.
    deleting: Option<String>,
    deleted: u32,
    /// By the sizes of the images.
    freed_bytes: u64,
    /// On the file system after the last deletion.
    available_bytes: Option<u64>,
    errors: Vec<String>,
}

/// Why images are deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CollectionReason {
    /// They were not used for `imageMaximumGCAge`.
    Age,
    /// The file system is fuller than `imageGCHighThresholdPercent`.
    Space { to_free_bytes: u64, wanted_bytes: u64, used_percent: u64, capacity_bytes: u64 },
    /// An eviction threshold is met: all that are unused.
    Eviction,
}

/// Why an image is deleted, as upstream's metric counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeletionReason {
    Age,
    Space,
}

impl ImageGc {
    /// The look that is to begin now; it counts as in flight.
    pub fn due(&mut self, settings: &ImageGcSettings, now: Now) -> Option<LookAtImages> {
        if self.next_wakeup(settings).is_none_or(|moment| moment > now.uptime) {
            return None;
        }
        self.is_looking = true;
        Some(if self.has_looked { LookAtImages::Later { save: self.uses() } } else { LookAtImages::First })
    }

    pub fn next_wakeup(&self, settings: &ImageGcSettings) -> Option<Uptime> {
        if self.is_looking || self.collection.is_some() {
            return None;
        }
        if self.reclaims {
            return Some(Uptime::ZERO);
        }
        settings.is_on().then_some(self.look_at.unwrap_or(Uptime::ZERO))
    }

    pub fn look_failed(&mut self, now: Now) {
        (self.is_looking, self.reclaims) = (false, false);
        self.look_at = Some(now.uptime + RETRY);
    }

    /// Takes in a look and decides what to delete. Nothing is deleted after the first: pods may not have begun to start.
    pub fn listed(&mut self, listing: ImageListing, settings: &ImageGcSettings, now: Now) -> Option<EventRecord> {
        let is_first = !std::mem::replace(&mut self.has_looked, true);
        self.is_looking = false;
        self.look_at = Some(now.uptime + if is_first { soon(settings) } else { INTERVAL });
        let ImageListing { images, in_use, space, remembered } = listing;
        let known = std::mem::take(&mut self.images);
        let used = |id: &String| {
            let earlier = known.get(id).map(|known| known.used).or(remembered.get(id).copied());
            let earlier = earlier.unwrap_or(ImageUse { first_seen: now.wall, last_used: None });
            ImageUse { last_used: if in_use.contains(id) { Some(now.wall) } else { earlier.last_used }, ..earlier }
        };
        let image = |ListedImage { id, names, size_bytes, is_pinned }| {
            let (used, is_in_use) = (used(&id), in_use.contains(&id));
            (id, Image { names, used, size_bytes, is_pinned, is_in_use })
        };
        self.images = images.into_iter().map(image).collect();
        if std::mem::take(&mut self.reclaims) {
            let unused = self.unused().into_iter().filter(|id| !self.is_young(id, settings, now)).collect();
            self.begin(CollectionReason::Eviction, unused);
            return None;
        }
        if is_first {
            return None;
        }
        let old = self.older_than(settings.max_age, now);
        if !old.is_empty() {
            self.begin(CollectionReason::Age, old);
            return None;
        }
        self.collect_space(space, settings, now)
    }

    fn collect_space(&mut self, space: Option<Space>, settings: &ImageGcSettings, now: Now) -> Option<EventRecord> {
        let Space { capacity_bytes, available_bytes } = space?;
        if capacity_bytes == 0 {
            let message = "invalid capacity 0 on image filesystem".to_owned();
            return Some(warning(event_reasons::INVALID_DISK_CAPACITY, message));
        }
        let available_bytes = available_bytes.min(capacity_bytes);
        let percent = |bytes: u64| {
            u64::try_from(u128::from(bytes).saturating_mul(100) / u128::from(capacity_bytes)).unwrap_or(100)
        };
        let used_percent = 100_u64.saturating_sub(percent(available_bytes));
        let free_percent = u128::from(100_u64.saturating_sub(settings.low_percent));
        let wanted_bytes = u128::from(capacity_bytes).saturating_mul(free_percent) / 100;
        let wanted_bytes = u64::try_from(wanted_bytes).unwrap_or(u64::MAX);
        let goes_on = std::mem::take(&mut self.is_unfinished) && available_bytes < wanted_bytes;
        if used_percent < settings.high_percent && (!goes_on || self.unused().is_empty()) {
            self.failures = 0;
            return None;
        }
        let to_free_bytes = wanted_bytes.saturating_sub(available_bytes);
        let (young, unused): (Vec<_>, Vec<_>) =
            self.unused().into_iter().partition(|id| self.is_young(id, settings, now));
        if !young.is_empty() {
            // They may be deleted soon, if space is still short.
            self.look_at = Some(now.uptime + soon(settings));
        }
        self.begin(CollectionReason::Space { to_free_bytes, wanted_bytes, used_percent, capacity_bytes }, unused);
        None
    }

    /// The node is under pressure: all unused images that are not young are deleted. They are looked at first.
    pub fn reclaim(&mut self) {
        self.reclaims = true;
    }

    /// Enough was reclaimed: no further image is deleted.
    pub fn stop_reclaiming(&mut self) {
        self.reclaims = false;
        if let Some(collection) = &mut self.collection
            && collection.reason == CollectionReason::Eviction
        {
            collection.queue.clear();
        }
    }

    pub fn is_reclaiming(&self) -> bool {
        self.reclaims || self.collection.as_ref().is_some_and(|it| it.reason == CollectionReason::Eviction)
    }

    fn begin(&mut self, reason: CollectionReason, ids: Vec<String>) {
        self.collection = Some(Collection {
            reason,
            queue: ids.into(),
            deleting: None,
            deleted: 0,
            freed_bytes: 0,
            available_bytes: None,
            errors: Vec::new(),
        });
    }

    fn is_young(&self, id: &str, settings: &ImageGcSettings, now: Now) -> bool {
        now.wall_since(self.images[id].used.first_seen) < settings.min_age
    }

    /// Unused and not pinned, those first that were not used for the longest time.
    fn unused(&self) -> Vec<String> {
        let mut unused: Vec<_> = self.images.iter().filter(|(_, image)| !image.is_in_use && !image.is_pinned).collect();
        unused.sort_by_key(|(_, image)| (image.used.last_used, image.used.first_seen));
        unused.into_iter().map(|(id, _)| id.clone()).collect()
    }

    /// An image that was never used counts from when it was first seen; upstream takes it for infinitely old. As upstream, none
    /// before the agent has run for that long: what a node needs may not have been seen since it was off.
    fn older_than(&self, max_age: Option<Duration>, now: Now) -> Vec<String> {
        let Some(max_age) = max_age.filter(|max_age| now.uptime.as_duration() > *max_age) else { return Vec::new() };
        let is_old = |id: &String| {
            let used = self.images[id].used;
            now.wall_since(used.last_used.unwrap_or(used.first_seen)) > max_age
        };
        self.unused().into_iter().filter(is_old).collect()
    }

    /// The image to delete now. `is_needed` says whether a container is about to get the image of this ID or name.
    pub fn plan(&mut self, is_needed: impl Fn(&str) -> bool) -> Option<(String, DeletionReason)> {
        let collection = self.collection.as_mut().filter(|collection| collection.deleting.is_none())?;
        if collection.has_enough() {
            return None;
        }
        while let Some(id) = collection.queue.pop_front() {
            let names = self.images.get(&id).map(|image| image.names.as_slice()).unwrap_or_default();
            if !is_needed(&id) && !names.iter().any(|name| is_needed(name)) {
                collection.deleting = Some(id.clone());
                let reason = match collection.reason {
                    CollectionReason::Age => DeletionReason::Age,
                    CollectionReason::Space { .. } | CollectionReason::Eviction => DeletionReason::Space,
                };
                return Some((id, reason));
            }
        }
        None
    }

    /// A deletion has ended, with the space on the file system after it, if that is known.
    pub fn deleted(&mut self, id: &str, result: Result<Option<Space>, EffectError>) {
        let Some(collection) = &mut self.collection else { return };
        collection.deleting = None;
        match result {
            Ok(space) => {
                collection.available_bytes = space.map(|space| space.available_bytes);
                let size_bytes = self.images.remove(id).map_or(0, |image| image.size_bytes);
                collection.freed_bytes = collection.freed_bytes.saturating_add(size_bytes);
                collection.deleted = collection.deleted.saturating_add(1);
            }
            Err(error) => collection.errors.push(error.message),
        }
    }

    /// Ends a collection that has nothing more to delete; returns what it has to tell.
    pub fn finish(&mut self, now: Now) -> Vec<EventRecord> {
        let is_over = |collection: &Collection| {
            collection.deleting.is_none() && (collection.queue.is_empty() || collection.has_enough())
        };
        let Some(collection) = self.collection.take_if(|collection| is_over(collection)) else { return Vec::new() };
        if collection.has_enough() && collection.is_short() {
            // Some file systems show freed space late, so the next look decides.
            self.is_unfinished = true;
            self.look_at = Some(now.uptime + MIN_INTERVAL);
        }
        let failure = collection.failure();
        self.note(&collection, failure.clone(), now);
        let mut events = Vec::new();
        if collection.deleted > 0 {
            let message =
                format!("Deleted {} unused images, {} in all", collection.deleted, size_text(collection.freed_bytes));
            events.push(EventRecord::new(
                InvolvedObject::Node,
                Severity::Normal,
                event_reasons::DELETED_IMAGES,
                message,
            ));
        }
        match failure {
            Some(message) => {
                self.failures = self.failures.saturating_add(1);
                // Upstream reports the error of a collection only when it is not the first in a row.
                if self.failures > 1 {
                    events.push(warning(event_reasons::IMAGE_GC_FAILED, message.clone()));
                }
                if collection.errors.is_empty() {
                    events.push(warning(event_reasons::FREE_DISK_SPACE_FAILED, message));
                }
            }
            None => self.failures = 0,
        }
        events
    }

    fn note(&mut self, collection: &Collection, failure: Option<String>, now: Now) {
        if collection.deleted == 0 && failure.is_none() {
            return;
        }
        self.has_changed = true;
        self.recent.push_back(ImageCollection {
            at: now.wall,
            reason: collection.reason.text(),
            images: collection.deleted,
            freed_bytes: collection.freed_bytes,
            failure,
        });
        if self.recent.len() > MAX_RECENT {
            self.recent.pop_front();
        }
    }

    /// Whether something changed for readers since the last call.
    pub fn take_change(&mut self) -> bool {
        std::mem::take(&mut self.has_changed)
    }

    /// The last collections of this process, the newest last.
    pub fn recent(&self) -> &VecDeque<ImageCollection> {
        &self.recent
    }

    /// What the next process should know.
    fn uses(&self) -> BTreeMap<String, ImageUse> {
        self.images.iter().map(|(id, image)| (id.clone(), image.used)).collect()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LookAtImages {
    /// Brings what an earlier process saved.
    First,
    /// Saves what is known of the images first.
    Later { save: BTreeMap<String, ImageUse> },
}

impl CollectionReason {
    /// For readers.
    fn text(self) -> String {
        match self {
            CollectionReason::Age => "not used for imageMaximumGCAge".to_owned(),
            CollectionReason::Space { used_percent, .. } => {
                format!("the file system of images was {used_percent}% full")
            }
            CollectionReason::Eviction => "an eviction threshold was met".to_owned(),
        }
    }
}

impl Collection {
    fn has_enough(&self) -> bool {
        match self.reason {
            CollectionReason::Age | CollectionReason::Eviction => false,
            CollectionReason::Space { to_free_bytes, .. } => {
                self.freed_bytes >= to_free_bytes || (self.available_bytes.is_some() && !self.is_short())
            }
        }
    }

    /// The file system has less room than wanted.
    fn is_short(&self) -> bool {
        match self.reason {
            CollectionReason::Age | CollectionReason::Eviction => false,
            CollectionReason::Space { wanted_bytes, .. } => {
                self.available_bytes.is_some_and(|available| available < wanted_bytes)
            }
        }
    }

    /// In upstream's words.
    fn failure(&self) -> Option<String> {
        let freed = self.freed_bytes;
        match self.reason {
            CollectionReason::Space { to_free_bytes, .. } if !self.errors.is_empty() => Some(format!(
                "wanted to free {to_free_bytes} bytes, but freed {freed} bytes space with errors in image deletion: {}",
                joined(&self.errors)
            )),
            CollectionReason::Space { used_percent, capacity_bytes, .. } if !self.has_enough() => Some(format!(
                "Insufficient free disk space on the node's image filesystem ({used_percent}% of {} used). Failed to \
                     free sufficient space by deleting unused images (freed {freed} bytes). Investigate disk usage, as it \
                     could be used by active images, logs, volumes, or other data.",
                size_text(capacity_bytes)
            )),
            CollectionReason::Age | CollectionReason::Eviction if !self.errors.is_empty() => Some(joined(&self.errors)),
            CollectionReason::Age | CollectionReason::Eviction | CollectionReason::Space { .. } => None,
        }
    }
}

/// When images that were just found may be deleted.
fn soon(settings: &ImageGcSettings) -> Duration {
    settings.min_age.clamp(MIN_INTERVAL, INTERVAL)
}

/// As Go joins errors.
fn joined(errors: &[String]) -> String {
    match errors {
        [one] => one.clone(),
        several => format!("[{}]", several.join(", ")),
    }
}

fn warning(reason: &str, message: String) -> EventRecord {
    EventRecord::new(InvolvedObject::Node, Severity::Warning, reason, message)
}

/// `512 B`, `93.1 GiB`.
fn size_text(bytes: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let unit = UNITS.into_iter().find(|(_, shift)| bytes >> shift > 0);
    #[expect(clippy::cast_precision_loss, reason = "one digit after the point is shown")]
    unit.map_or_else(
        || format!("{bytes} B"),
        |(name, shift)| format!("{:.1} {name}", bytes as f64 / (1_u64 << shift) as f64),
    )
}

#[cfg(test)]
mod tests;
