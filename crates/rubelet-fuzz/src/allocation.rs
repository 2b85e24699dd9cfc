//! A limit for the memory that a target has allocated at once.
//!
//! Owns: the allocator of programs that use this crate. It counts for the whole process, because a target may use other threads:
//! one target runs at a time.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// An input that makes a target allocate this much would end the machine before the target returns.
const ABORT_BYTES: usize = 1 << 30;

/// Panics if `work` had more than `max_bytes` allocated at once.
pub(crate) fn limited<T>(max_bytes: usize, work: impl FnOnce() -> T) -> T {
    let before = ALLOCATED.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = work();
    let used = PEAK.load(Relaxed).saturating_sub(before);
    assert!(used <= max_bytes, "{used} bytes were allocated at once, at most {max_bytes} may be");
    result
}

fn added(bytes: usize) {
    let allocated = ALLOCATED.fetch_add(bytes, Relaxed) + bytes;
    PEAK.fetch_max(allocated, Relaxed);
    if allocated > ABORT_BYTES {
        std::process::abort();
    }
}

fn removed(bytes: usize) {
    ALLOCATED.fetch_sub(bytes, Relaxed);
}

#[expect(
    unsafe_code,
    reason = "an allocator is unsafe by its trait; every call goes to the system's with its own arguments"
)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        added(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        removed(layout.size());
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        added(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        added(new_size);
        removed(layout.size());
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

#[cfg(test)]
mod tests {
    use std::{hint::black_box, panic::catch_unwind};

    use super::*;

    #[test]
    fn memory_beyond_the_limit_is_a_panic_even_if_it_is_freed() {
        let allocate = |bytes: usize| drop(black_box(vec![0_u8; bytes]));
        limited(1 << 20, || allocate(1 << 19));
        assert!(catch_unwind(|| limited(1 << 20, || allocate(1 << 21))).is_err());
        limited(1 << 20, || allocate(1 << 19));
    }
}
