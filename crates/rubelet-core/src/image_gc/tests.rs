//! Looks at the images, one after the other, and which images are deleted.

use super::*;
use crate::{effect::ErrorKind, test_support::later};

const GIB: u64 = 1 << 30;

fn settings() -> ImageGcSettings {
    ImageGcSettings::default()
}

/// `name size-in-GiB`, with `used` or `pinned` behind it.
fn listing(images: &[&str], space: Option<(u64, u64)>) -> ImageListing {
    let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let listed = images.iter().map(|text| words(text)).map(|words| ListedImage {
        id: words[0].clone(),
        names: vec![format!("example.com/{}:v1", words[0])],
        size_bytes: words[1].parse::<u64>().unwrap() * GIB,
        is_pinned: words.contains(&"pinned".to_owned()),
    });
    let used = images.iter().map(|text| words(text)).filter(|words| words.contains(&"used".to_owned()));
    ImageListing {
        images: listed.collect(),
        in_use: used.map(|words| words[0].clone()).collect(),
        space: space
            .map(|(capacity, available)| Space { capacity_bytes: capacity * GIB, available_bytes: available * GIB }),
        remembered: BTreeMap::new(),
    }
}

/// Deletes what is planned, until nothing is; the ids in order.
fn collected(gc: &mut ImageGc) -> Vec<String> {
    let mut ids = Vec::new();
    while let Some((id, _)) = gc.plan(|_| false) {
        gc.deleted(&id, Ok(None));
        ids.push(id);
    }
    ids
}

fn texts(events: &[EventRecord]) -> Vec<String> {
    events.iter().map(|event| format!("{}: {}", event.reason, event.message)).collect()
}

#[test]
fn least_recently_used_images_are_deleted_down_to_the_low_threshold() {
    let mut gc = ImageGc::default();
    let images = ["a 4", "b 4 used", "c 4", "d 4", "p 4 pinned"];
    // In the order of their last use: d, a, c.
    for (secs, used) in [(0, "d"), (300, "a"), (600, "c")] {
        let images: Vec<String> = images
            .iter()
            .map(|text| if text.starts_with(used) { format!("{text} used") } else { (*text).to_owned() })
            .collect();
        let images: Vec<&str> = images.iter().map(String::as_str).collect();
        assert_eq!(gc.listed(listing(&images, Some((100, 50))), &settings(), later(secs)), None);
        assert!(collected(&mut gc).is_empty() && gc.finish(later(901)).is_empty());
    }
    // 86 % used, at most 80 % are wanted: 6 GiB.
    gc.listed(listing(&images, Some((100, 14))), &settings(), later(900));
    assert_eq!(gc.next_wakeup(&settings()), None, "the next look comes after the collection");
    assert_eq!(collected(&mut gc), ["d", "a"]);
    assert_eq!(texts(&gc.finish(later(901))), ["DeletedImages: Deleted 2 unused images, 8.0 GiB in all"]);
    assert_eq!(gc.next_wakeup(&settings()), Some(later(1200).uptime));
    let noted = ImageCollection {
        at: later(901).wall,
        reason: "the file system of images was 86% full".to_owned(),
        images: 2,
        freed_bytes: 8 * GIB,
        failure: None,
    };
    assert_eq!(gc.recent(), &[noted]);
    assert!(gc.take_change() && !gc.take_change());
}

#[test]
fn readers_see_the_last_collections_and_none_that_did_nothing() {
    let mut gc = ImageGc::default();
    gc.listed(listing(&["a 4"], Some((100, 50))), &settings(), later(0));
    for round in 1..=u64::try_from(MAX_RECENT).unwrap() + 5 {
        gc.reclaim();
        gc.listed(listing(&["a 4"], None), &settings(), later(round * 1000));
        assert_eq!(collected(&mut gc), ["a"]);
        gc.finish(later(round * 1000 + 1));
        // All that is left is in use.
        gc.reclaim();
        gc.listed(listing(&["a 4 used"], None), &settings(), later(round * 1000 + 500));
        gc.finish(later(round * 1000 + 501));
    }
    let recent = gc.recent();
    let (first, last) = (recent.front().unwrap(), recent.back().unwrap());
    assert_eq!((recent.len(), first.at, last.at), (MAX_RECENT, later(6001).wall, later(25_001).wall));
    assert_eq!((last.reason.as_str(), last.images), ("an eviction threshold was met", 1));
}

/// Deletes what is planned of a file system of 100 GiB; each deletion frees this much of it.
fn collected_with_space(gc: &mut ImageGc, mut available: u64, freed: u64) -> (Vec<String>, u64) {
    let mut ids = Vec::new();
    while let Some((id, _)) = gc.plan(|_| false) {
        available += freed;
        gc.deleted(&id, Ok(Some(Space { capacity_bytes: 100 * GIB, available_bytes: available * GIB })));
        ids.push(id);
    }
    (ids, available)
}

#[test]
fn deletion_stops_when_the_file_system_has_room_whatever_the_sizes() {
    let mut gc = ImageGc::default();
    let images = ["a 1", "b 1", "c 1", "d 1"];
    gc.listed(listing(&images, Some((100, 50))), &settings(), later(0));
    // 6 GiB are wanted: all four by their sizes, two as they are unpacked.
    gc.listed(listing(&images, Some((100, 14))), &settings(), later(900));
    assert_eq!(collected_with_space(&mut gc, 14, 3), (vec!["a".to_owned(), "b".to_owned()], 20));
    assert_eq!(texts(&gc.finish(later(900))), ["DeletedImages: Deleted 2 unused images, 2.0 GiB in all"]);
    assert_eq!(gc.next_wakeup(&settings()), Some(later(1200).uptime));
}

#[test]
fn deletion_goes_on_to_the_low_threshold_if_images_share_layers() {
    let mut gc = ImageGc::default();
    let images = ["a 4", "b 4", "c 4", "d 4", "e 4"];
    gc.listed(listing(&images, Some((100, 50))), &settings(), later(0));
    gc.listed(listing(&images, Some((100, 14))), &settings(), later(900));
    assert_eq!(collected_with_space(&mut gc, 14, 2), (vec!["a".to_owned(), "b".to_owned()], 18));
    assert_eq!(gc.finish(later(900)).len(), 1);
    assert_eq!(gc.next_wakeup(&settings()), Some(later(910).uptime), "it is not at the low threshold");
    // Below the high one.
    gc.listed(listing(&images[2..], Some((100, 18))), &settings(), later(910));
    assert_eq!(collected_with_space(&mut gc, 18, 2), (vec!["c".to_owned()], 20));
    gc.finish(later(910));
    assert_eq!(gc.next_wakeup(&settings()), Some(later(1210).uptime));
    gc.listed(listing(&images[3..], Some((100, 18))), &settings(), later(1210));
    assert!(gc.collection.is_none(), "a new collection begins at the high threshold");
}

#[test]
fn images_in_use_pinned_young_or_needed_stay() {
    let mut gc = ImageGc::default();
    let images = ["used 4 used", "pinned 4 pinned", "old 4", "needed 4", "named 4"];
    gc.listed(listing(&images, Some((100, 50))), &settings(), later(0));
    let images = ["used 4 used", "pinned 4 pinned", "old 4", "needed 4", "named 4", "young 4"];
    gc.listed(listing(&images, Some((100, 1))), &settings(), later(120));
    let is_needed = |id: &str| id == "needed" || id == "example.com/named:v1";
    assert_eq!(gc.plan(is_needed), Some(("old".to_owned(), DeletionReason::Space)));
    assert_eq!(gc.plan(is_needed), None, "one at a time");
    gc.deleted("old", Ok(None));
    assert_eq!(gc.plan(is_needed), None);
    assert_eq!(gc.look_at, Some(later(240).uptime), "the young one may go when it is old enough");
    insta::assert_snapshot!(texts(&gc.finish(later(901))).join("\n"), @r"
    DeletedImages: Deleted 1 unused images, 4.0 GiB in all
    FreeDiskSpaceFailed: Insufficient free disk space on the node's image filesystem (99% of 100.0 GiB used). Failed to free sufficient space by deleting unused images (freed 4294967296 bytes). Investigate disk usage, as it could be used by active images, logs, volumes, or other data.
    ");
}

#[test]
fn error_is_reported_from_the_second_collection_on() {
    let mut gc = ImageGc::default();
    for (secs, expected) in [(0, 0), (300, 0), (600, 1)] {
        gc.listed(listing(&["a 4"], Some((100, 10))), &settings(), later(secs));
        while let Some((id, _)) = gc.plan(|_| false) {
            let error = EffectError { kind: ErrorKind::Retry, message: "read-only file system".to_owned() };
            gc.deleted(&id, Err(error));
        }
        let events = gc.finish(later(901));
        let failed = events.iter().filter(|event| event.reason == "ImageGCFailed").count();
        assert_eq!(failed, expected, "{events:?}");
    }
}

#[test]
fn unused_images_are_deleted_at_their_maximum_age_whatever_the_space() {
    let settings = ImageGcSettings { max_age: Some(Duration::from_secs(3600)), ..settings() };
    let mut gc = ImageGc::default();
    gc.listed(listing(&["a 1 used", "b 1", "c 1 used"], Some((100, 90))), &settings, later(0));
    gc.listed(listing(&["a 1", "b 1", "c 1 used"], Some((100, 90))), &settings, later(3000));
    assert!(collected(&mut gc).is_empty());
    gc.finish(later(901));
    gc.listed(listing(&["a 1", "b 1", "c 1 used"], Some((100, 90))), &settings, later(3601));
    assert_eq!(collected(&mut gc), ["b", "a"]);
}

#[test]
fn no_image_is_too_old_before_the_agent_has_run_for_that_long() {
    let settings = ImageGcSettings { max_age: Some(Duration::from_secs(3600)), ..settings() };
    let at = |uptime_secs: u64| Now { uptime: Uptime::from_secs(uptime_secs), ..later(uptime_secs) };
    let long_ago = ImageUse { first_seen: "2020-01-01T00:00:00Z".parse().unwrap(), last_used: None };
    let remembered = BTreeMap::from([("a".to_owned(), long_ago)]);
    let mut gc = ImageGc::default();
    gc.listed(ImageListing { remembered, ..listing(&["a 1"], Some((100, 90))) }, &settings, at(1));
    for (secs, expected) in [(11, vec![]), (3600, vec![]), (3601, vec!["a".to_owned()])] {
        gc.listed(listing(&["a 1"], Some((100, 90))), &settings, at(secs));
        assert_eq!(collected(&mut gc), expected, "after {secs} s");
        gc.finish(at(secs));
    }
}

#[test]
fn last_use_is_remembered_over_a_restart() {
    let mut before = ImageGc::default();
    before.listed(listing(&["a 4 used", "b 4"], Some((100, 50))), &settings(), later(0));
    before.listed(listing(&["a 4", "b 4 used"], Some((100, 50))), &settings(), later(300));
    let mut after = ImageGc::default();
    assert_eq!(after.due(&settings(), later(301)), Some(LookAtImages::First));
    assert_eq!((after.due(&settings(), later(301)), after.next_wakeup(&settings())), (None, None));
    let Some(LookAtImages::Later { save }) = before.due(&settings(), later(600)) else { panic!("it is due") };
    let found = ImageListing { remembered: save, ..listing(&["b 4", "a 4"], Some((100, 14))) };
    after.listed(found, &settings(), later(301));
    assert!(collected(&mut after).is_empty(), "pods may not have begun to start");
    after.listed(listing(&["b 4", "a 4"], Some((100, 14))), &settings(), later(601));
    assert_eq!(collected(&mut after), ["a", "b"]);
}

#[test]
fn invalid_capacity_is_an_event() {
    let mut gc = ImageGc::default();
    gc.listed(listing(&[], Some((0, 0))), &settings(), later(0));
    let event = gc.listed(listing(&[], Some((0, 0))), &settings(), later(300)).unwrap();
    assert_eq!(texts(&[event]), ["InvalidDiskCapacity: invalid capacity 0 on image filesystem"]);
}

#[test]
fn nothing_is_looked_at_if_collection_is_off() {
    let settings = ImageGcSettings { high_percent: 100, ..settings() };
    assert_eq!(ImageGc::default().due(&settings, later(1000)), None);
}
