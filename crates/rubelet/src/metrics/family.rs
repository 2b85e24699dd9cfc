//! Counters, gauges and histograms, with and without labels.
//!
//! Owns: the series of a family, and their maximum number. Observing allocates only for a new series.
//! Never: a label value that a client can choose; the caller uses a bounded set.
//! Upstream: `component-base/metrics`, `prometheus/client_golang`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::text::{Labels, Text};

/// Far more than a full node needs; beyond it, new series are dropped. A guard against mistakes, since labels are bounded.
const MAX_SERIES: usize = 8192;

/// `prometheus.DefBuckets`, in seconds.
pub(crate) const DEFAULT_BOUNDS: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

pub(crate) type Counters<const N: usize> = Family<Counter, N>;
pub(crate) type Gauges<const N: usize> = Family<Gauge, N>;
pub(crate) type Histograms<const N: usize> = Family<Histogram, N>;

/// Series of one name with `N` labels. Without labels there is one series from the start.
#[derive(Debug)]
pub(crate) struct Family<V, const N: usize> {
    name: &'static str,
    labels: [&'static str; N],
    /// With the stability level in front, as upstream shows it.
    help: &'static str,
    /// The initial value of a new series.
    fresh: V,
    /// Sorted by label values.
    series: Mutex<Vec<([Box<str>; N], V)>>,
}

/// The value of a series.
pub(crate) trait Value: Clone {
    const KIND: &'static str;

    fn write(&self, name: &str, labels: Labels<'_>, text: &mut Text);
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Counter(u64);

#[derive(Clone, Debug, Default)]
pub(crate) struct Gauge(f64);

#[derive(Clone, Debug)]
pub(crate) struct Histogram {
    bounds: &'static [f64],
    /// One count per bound, and the last for values above all bounds; not cumulative.
    counts: Box<[u64]>,
    sum: f64,
}

impl<const N: usize> Counters<N> {
    pub(crate) fn new(name: &'static str, labels: [&'static str; N], help: &'static str) -> Self {
        Family::starting_as(Counter::default(), name, labels, help)
    }

    pub(crate) fn inc(&self, labels: [&str; N]) {
        self.change(labels, |counter| counter.0 += 1);
    }
}

impl<const N: usize> Gauges<N> {
    pub(crate) fn new(name: &'static str, labels: [&'static str; N], help: &'static str) -> Self {
        Family::starting_as(Gauge::default(), name, labels, help)
    }

    pub(crate) fn set(&self, labels: [&str; N], value: f64) {
        self.change(labels, |gauge| gauge.0 = value);
    }

    pub(crate) fn add(&self, labels: [&str; N], difference: f64) {
        self.change(labels, |gauge| gauge.0 += difference);
    }
}

impl<const N: usize> Histograms<N> {
    /// `bounds` in ascending order.
    pub(crate) fn new(
        name: &'static str,
        labels: [&'static str; N],
        bounds: &'static [f64],
        help: &'static str,
    ) -> Self {
        assert!(bounds.is_sorted(), "{name}: bounds rise");
        let counts = vec![0; bounds.len() + 1].into_boxed_slice();
        Family::starting_as(Histogram { bounds, counts, sum: 0.0 }, name, labels, help)
    }

    pub(crate) fn observe(&self, labels: [&str; N], value: f64) {
        self.change(labels, |histogram| {
            let bucket = histogram.bounds.partition_point(|bound| *bound < value);
            histogram.counts[bucket] += 1;
            histogram.sum += value;
        });
    }
}

impl<V: Value, const N: usize> Family<V, N> {
    fn starting_as(fresh: V, name: &'static str, labels: [&'static str; N], help: &'static str) -> Self {
        let family = Family { name, labels, help, fresh, series: Mutex::default() };
        if N == 0 {
            family.change([""; N], |_| {});
        }
        family
    }

    fn change(&self, labels: [&str; N], change: impl FnOnce(&mut V)) {
        let mut series = self.lock();
        let found = series.binary_search_by(|(known, _)| known.iter().map(AsRef::as_ref).cmp(labels));
        match found {
            Ok(index) => change(&mut series[index].1),
            Err(index) if series.len() < MAX_SERIES => {
                let mut value = self.fresh.clone();
                change(&mut value);
                series.insert(index, (labels.map(Box::from), value));
            }
            Err(_full) => {}
        }
    }

    /// Removes series by label values.
    pub(crate) fn retain(&self, mut is_wanted: impl FnMut(&[Box<str>; N]) -> bool) {
        self.lock().retain(|(labels, _)| is_wanted(labels));
    }

    /// A family without series is not written.
    pub(crate) fn write(&self, text: &mut Text) {
        let series = self.lock();
        if series.is_empty() {
            return;
        }
        text.head(self.name, V::KIND, self.help);
        for (values, value) in series.iter() {
            let pairs: [_; N] = std::array::from_fn(|index| (self.labels[index], &*values[index]));
            value.write(self.name, Labels::of(&pairs), text);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<([Box<str>; N], V)>> {
        self.series.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Value for Counter {
    const KIND: &'static str = "counter";

    #[expect(clippy::cast_precision_loss, reason = "the format knows only floats; nobody counts to 2^53")]
    fn write(&self, name: &str, labels: Labels<'_>, text: &mut Text) {
        text.sample((name, ""), labels, self.0 as f64);
    }
}

impl Value for Gauge {
    const KIND: &'static str = "gauge";

    fn write(&self, name: &str, labels: Labels<'_>, text: &mut Text) {
        text.sample((name, ""), labels, self.0);
    }
}

impl Value for Histogram {
    const KIND: &'static str = "histogram";

    #[expect(clippy::cast_precision_loss, reason = "the format knows only floats; nobody counts to 2^53")]
    fn write(&self, name: &str, labels: Labels<'_>, text: &mut Text) {
        let mut count = 0;
        let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
        for (bound, within) in bounds.zip(&self.counts) {
            count += within;
            text.sample((name, "_bucket"), Labels { bound: Some(bound), ..labels }, count as f64);
        }
        text.sample((name, "_sum"), labels, self.sum);
        text.sample((name, "_count"), labels, count as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(write: impl Fn(&mut Text)) -> String {
        let mut text = Text::default();
        write(&mut text);
        text.into_string()
    }

    #[test]
    fn labelled_counter_appears_with_its_first_count() {
        let (plain, labelled) = (Counters::new("a", [], "[ALPHA] A."), Counters::new("b", ["l"], "[ALPHA] B."));
        let shown = || {
            page(|text| {
                plain.write(text);
                labelled.write(text)
            })
        };
        insta::assert_snapshot!(shown(), @r"
        # HELP a [ALPHA] A.
        # TYPE a counter
        a 0
        ");
        labelled.inc(["y"]);
        labelled.inc(["x"]);
        labelled.inc(["x"]);
        plain.inc([]);
        insta::assert_snapshot!(shown(), @r#"
        # HELP a [ALPHA] A.
        # TYPE a counter
        a 1
        # HELP b [ALPHA] B.
        # TYPE b counter
        b{l="x"} 2
        b{l="y"} 1
        "#);
    }

    #[test]
    fn bucket_counts_values_up_to_its_bound() {
        let family = Histograms::new("h", ["l"], &[1.0, 2.0], "[ALPHA] H.");
        for value in [0.5, 1.0, 1.5, 3.0] {
            family.observe(["x"], value);
        }
        insta::assert_snapshot!(page(|text| family.write(text)), @r#"
        # HELP h [ALPHA] H.
        # TYPE h histogram
        h_bucket{l="x",le="1"} 2
        h_bucket{l="x",le="2"} 3
        h_bucket{l="x",le="+Inf"} 4
        h_sum{l="x"} 6
        h_count{l="x"} 4
        "#);
    }

    #[test]
    fn a_family_does_not_grow_without_end() {
        let family = Counters::new("a", ["l"], "[ALPHA] A.");
        for number in 0..MAX_SERIES + 100 {
            family.inc([&number.to_string()]);
        }
        assert_eq!(family.lock().len(), MAX_SERIES);
        family.retain(|[label]| &**label == "7");
        assert_eq!(family.lock().len(), 1);
    }
}
