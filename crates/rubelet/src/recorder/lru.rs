//! A map that evicts the least recently used entry.
//!
//! Owns: the bound on the recorder's memory. Upstream: `utils/lru`.

use std::collections::BTreeMap;

/// Upstream's size; a few hundred bytes per entry.
const CAPACITY: usize = 4096;

#[derive(Debug)]
pub(super) struct LruCache<V> {
    entries: BTreeMap<String, (u64, V)>,
    /// Entries by last use, the least recently used first.
    uses: BTreeMap<u64, String>,
    now: u64,
}

impl<V> Default for LruCache<V> {
    fn default() -> Self {
        LruCache { entries: BTreeMap::new(), uses: BTreeMap::new(), now: 0 }
    }
}

impl<V> LruCache<V> {
    /// The value of the key, or what `make` returns. It becomes the most recently used.
    pub(super) fn entry(&mut self, key: &str, make: impl FnOnce() -> V) -> &mut V {
        self.now += 1;
        match self.entries.get(key) {
            Some((used, _)) => {
                self.uses.remove(used);
            }
            None => self.make_room(),
        }
        self.uses.insert(self.now, key.to_owned());
        let (used, value) = self.entries.entry(key.to_owned()).or_insert_with(|| (0, make()));
        *used = self.now;
        value
    }

    fn make_room(&mut self) {
        if self.entries.len() == CAPACITY
            && let Some((_, oldest)) = self.uses.pop_first()
        {
            self.entries.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_recently_used_entry_is_evicted_first() {
        let mut lru = LruCache::default();
        for key in 0..CAPACITY {
            lru.entry(&key.to_string(), || key);
        }
        lru.entry("0", || unreachable!("still known"));
        lru.entry("new", || 7);
        assert_eq!(*lru.entry("0", || 99), 0, "was used again");
        assert_eq!(*lru.entry("1", || 99), 99, "was not");
        assert_eq!((lru.entries.len(), lru.uses.len()), (CAPACITY, CAPACITY));
    }
}
