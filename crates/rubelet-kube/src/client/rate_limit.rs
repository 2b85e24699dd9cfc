//! The client-side rate limiter: QPS and burst.
//!
//! Owns: the token bucket of a lane. Never: drops or reorders; requests are served in order.
//! Upstream: `client-go/util/flowcontrol`.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use crate::clock;

/// `kubeAPIQPS` with `kubeAPIBurst`, or `eventRecordQPS` with `eventBurst`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimit {
    /// Zero is client-go's default; negative is unlimited.
    pub qps: i32,
    /// Zero is client-go's default.
    pub burst: i32,
}

impl RateLimit {
    pub const NONE: RateLimit = RateLimit { qps: -1, burst: 0 };

    const DEFAULT_QPS: i32 = 5;
    const DEFAULT_BURST: i32 = 10;
}

#[derive(Debug)]
pub(super) struct Bucket {
    limit: Option<Limit>,
}

#[derive(Debug)]
struct Limit {
    per_second: f64,
    burst: f64,
    level: Mutex<Level>,
}

#[derive(Debug)]
struct Level {
    /// Negative by the tokens reserved for waiting requests.
    tokens: f64,
    at: Instant,
}

impl Bucket {
    pub(super) fn new(limit: RateLimit) -> Self {
        let qps = if limit.qps == 0 { RateLimit::DEFAULT_QPS } else { limit.qps };
        if qps < 0 {
            return Bucket { limit: None };
        }
        let burst = if limit.burst == 0 { RateLimit::DEFAULT_BURST } else { limit.burst };
        let burst = f64::from(burst.max(1));
        let level = Mutex::new(Level { tokens: burst, at: clock::now() });
        Bucket { limit: Some(Limit { per_second: f64::from(qps), burst, level }) }
    }

    pub(super) fn is_limited(&self) -> bool {
        self.limit.is_some()
    }

    /// Waits for a token. `Err` with the required wait if it would end after `deadline`: no token is taken then.
    pub(super) async fn turn(&self, deadline: Instant) -> Result<(), Duration> {
        let Some(limit) = &self.limit else { return Ok(()) };
        let wait = limit.reserve(clock::now(), deadline)?;
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        Ok(())
    }
}

impl Limit {
    fn reserve(&self, now: Instant, deadline: Instant) -> Result<Duration, Duration> {
        let mut level = self.level.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = now.duration_since(level.at).as_secs_f64();
        level.tokens = (level.tokens + passed * self.per_second).min(self.burst);
        level.at = now;
        let missing = 1.0 - level.tokens;
        let wait = Duration::try_from_secs_f64((missing / self.per_second).max(0.0)).unwrap_or(Duration::MAX);
        if clock::after(now, wait) > deadline {
            return Err(wait);
        }
        level.tokens -= 1.0;
        Ok(wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn seconds_for(limit: RateLimit, requests: usize) -> f64 {
        let bucket = Bucket::new(limit);
        let start = clock::now();
        for _ in 0..requests {
            bucket.turn(start + Duration::from_secs(3600)).await.unwrap();
        }
        start.elapsed().as_secs_f64()
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_burst_requests_come_at_the_rate() {
        let taken = seconds_for(RateLimit { qps: 50, burst: 100 }, 150).await;
        assert!((1.0..1.1).contains(&taken), "{taken}");
        assert_eq!(seconds_for(RateLimit { qps: 50, burst: 100 }, 100).await, 0.0);
    }

    #[tokio::test(start_paused = true)]
    async fn zero_is_the_default_of_client_go_and_less_is_no_limit() {
        let taken = seconds_for(RateLimit { qps: 0, burst: 0 }, 15).await;
        assert!((1.0..1.1).contains(&taken), "{taken}");
        assert_eq!(seconds_for(RateLimit::NONE, 10_000).await, 0.0);
    }

    #[tokio::test(start_paused = true)]
    async fn rate_limiter_rejects_waits_beyond_the_timeout_for_free() {
        let bucket = Bucket::new(RateLimit { qps: 1, burst: 1 });
        let start = clock::now();
        bucket.turn(start).await.unwrap();
        for _ in 0..5 {
            bucket.turn(start + Duration::from_millis(500)).await.unwrap_err();
        }
        bucket.turn(start + Duration::from_secs(2)).await.unwrap();
        assert_eq!(start.elapsed().as_secs(), 1);
    }
}
