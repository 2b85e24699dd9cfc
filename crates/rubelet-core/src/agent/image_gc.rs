//! Collection of images: its looks and deletions, and their results.
//!
//! Owns: the routing, and whether a container is about to get an image. The decisions are in `image_gc.rs`.
//! Upstream: `StartGarbageCollection`.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    agent::Agent,
    effect::{EffectError, Facts},
    flights::Subject,
    id::PodUid,
    image_gc::ListedImage,
    node::Routine,
    op::{ImageOp, Op},
    pod::PodRecord,
    time::Now,
};

impl Agent {
    pub(super) fn images_listed(&mut self, result: Result<Facts, EffectError>, now: Now) {
        let Ok(Facts::Images(mut listing)) = result else { return self.node.image_gc.look_failed(now) };
        let mounted: BTreeSet<&str> = mounted_images(&self.records).collect();
        let is_mounted = |image: &&ListedImage| mounted.contains(image.id.as_str());
        listing.in_use.extend(listing.images.iter().filter(is_mounted).map(|image| image.id.clone()));
        if let Some(event) = self.node.image_gc.listed(listing, &self.settings.image_gc, now) {
            self.outbox.record(event);
        }
    }

    pub(super) fn image_deleted(&mut self, op: &Op, result: Result<Facts, EffectError>) {
        if let Op::Image(ImageOp::Delete { id, .. }) = op {
            let space = result.map(|facts| if let Facts::ImageDeleted { space } = facts { space } else { None });
            self.node.image_gc.deleted(id, space);
        }
    }

    /// Sends the next deletion of a collection, or ends it.
    pub(super) fn delete_images(&mut self, now: Now) {
        if !self.node.is_ready() {
            return;
        }
        let (flights, images, records) = (&self.outbox.flights, &self.images, &self.records);
        let is_needed = |image: &str| {
            flights.uses_image(image) || images.needs(image) || mounted_images(records).any(|mounted| mounted == image)
        };
        if let Some((id, reason)) = self.node.image_gc.plan(is_needed) {
            let (subject, op) = (Subject::Node(Routine::DeleteImage), ImageOp::Delete { id, reason });
            self.outbox.send(subject, op, "it is not used".to_owned(), &self.settings, now);
        }
        for event in self.node.image_gc.finish(now) {
            self.outbox.record(event);
        }
    }
}

/// The images that are volumes of containers, dead ones too. Upstream: `handleImageVolumes`.
fn mounted_images(records: &BTreeMap<PodUid, PodRecord>) -> impl Iterator<Item = &str> {
    let facts = records.values().filter_map(|record| record.facts.as_ref());
    let containers = facts.flat_map(|facts| &facts.containers);
    containers.flat_map(|container| &container.image_volumes).map(String::as_str)
}
