//! A seeded random generator.

/// Splitmix64.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    pub fn seeded(seed: u64) -> Self {
        Dice(seed)
    }

    /// A number below `sides`.
    pub fn below(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let sides = u64::try_from(sides.max(1)).unwrap_or(u64::MAX);
        usize::try_from((mixed ^ (mixed >> 31)) % sides).unwrap_or_default()
    }
}
