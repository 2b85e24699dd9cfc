//! Collection of images: its looks and deletions, and their results.
//!
//! Owns: the routing, and whether a container is about to get an image. The decisions are in `image_gc.rs`.
//! Upstream: `StartGarbageCollection`.

use crate::{
    agent::Agent,
    effect::{EffectError, Facts},
    flights::Subject,
    node::Routine,
    op::{ImageOp, Op},
    time::Now,
};

impl Agent {
    pub(super) fn images_listed(&mut self, result: Result<Facts, EffectError>, now: Now) {
        let Ok(Facts::Images(listing)) = result else { return self.node.image_gc.look_failed(now) };
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
        let (flights, images) = (&self.outbox.flights, &self.images);
        let is_needed = |image: &str| flights.uses_image(image) || images.needs(image);
        if let Some((id, reason)) = self.node.image_gc.plan(is_needed) {
            let (subject, op) = (Subject::Node(Routine::DeleteImage), ImageOp::Delete { id, reason });
            self.outbox.send(subject, op, "it is not used".to_owned(), &self.settings, now);
        }
        for event in self.node.image_gc.finish(now) {
            self.outbox.record(event);
        }
    }
}
