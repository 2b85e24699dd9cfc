//! A cache of reviews by the API server.
//!
//! Owns: how long a review is cached, sharing one request between concurrent callers, the maximum of running requests and of
//! entries.
//! Upstream: `cachedTokenAuthenticator`, the LRU of the authorizer's webhook.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rubelet_core::time::Uptime;
use tokio::sync::{OnceCell, Semaphore};

use crate::world::Clock;

/// A token or a set of attributes, as SHA-256: the cache holds no secret.
pub(super) type Question = [u8; 32];

/// Enough for every monitor and controller that calls a node, and small if a client tries many tokens.
const KEPT: usize = 1024;

/// Running reviews; more wait. A client that tries many tokens delays only other uncached tokens.
const ASKED_AT_ONCE: usize = 32;

#[derive(Debug)]
pub(super) struct Reviews<T> {
    clock: Clock,
    turns: Semaphore,
    answers: Mutex<BTreeMap<Question, Arc<OnceCell<Answer<T>>>>>,
}

#[derive(Debug)]
struct Answer<T> {
    answer: T,
    until: Uptime,
}

impl<T: Clone> Reviews<T> {
    pub(super) fn new(clock: Clock) -> Self {
        Reviews { clock, turns: Semaphore::new(ASKED_AT_ONCE), answers: Mutex::default() }
    }

    /// The cached review, or the result of `ask` with its cache time. An error is not cached.
    pub(super) async fn get<E>(
        &self,
        question: Question,
        ask: impl Future<Output = Result<(T, Duration), E>>,
    ) -> Result<T, E> {
        let cell = self.cell(question);
        let asked = cell.get_or_try_init(|| async {
            let _turn = self.turns.acquire().await.expect("the semaphore is never closed");
            let (answer, keep) = ask.await?;
            Ok(Answer { answer, until: self.clock.now().uptime + keep })
        });
        let asked = asked.await.map(|answer| answer.answer.clone());
        if asked.is_err() {
            self.forget(&question, &cell);
        }
        asked
    }

    /// The entry for the key: valid, being filled, or new.
    fn cell(&self, question: Question) -> Arc<OnceCell<Answer<T>>> {
        let now = self.clock.now().uptime;
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cell) = answers.get(&question)
            && cell.get().is_none_or(|answer| now < answer.until)
        {
            return cell.clone();
        }
        if answers.len() >= KEPT {
            answers.retain(|_, cell| cell.get().is_none_or(|answer| now < answer.until));
        }
        if answers.len() >= KEPT {
            // Waiting callers hold the entry itself; eviction only removes it from the cache.
            answers.pop_first();
        }
        let cell = Arc::new(OnceCell::new());
        answers.insert(question, cell.clone());
        cell
    }

    fn forget(&self, question: &Question, cell: &Arc<OnceCell<Answer<T>>>) {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        if answers.get(question).is_some_and(|kept| Arc::ptr_eq(kept, cell) && kept.get().is_none()) {
            answers.remove(question);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn reviews() -> Reviews<u32> {
        Reviews::new(Clock::simulated(jiff::Timestamp::UNIX_EPOCH, Arc::default()))
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_holds_for_its_time_and_an_error_not_at_all() {
        let reviews = reviews();
        let keep = Duration::from_secs(10);
        assert_eq!(reviews.get([1; 32], async { Err("away") }).await, Err("away"));
        assert_eq!(reviews.get([1; 32], async { Ok::<_, &str>((1, keep)) }).await, Ok(1));
        assert_eq!(reviews.get([1; 32], async { Ok::<_, &str>((2, keep)) }).await, Ok(1));
        assert_eq!(reviews.get([2; 32], async { Ok::<_, &str>((3, keep)) }).await, Ok(3));
        tokio::time::sleep(keep).await;
        assert_eq!(reviews.get([1; 32], async { Err("away") }).await, Err("away"));
        assert_eq!(reviews.get([1; 32], async { Ok::<_, &str>((4, keep)) }).await, Ok(4));
    }

    #[tokio::test(start_paused = true)]
    async fn concurrent_equal_reviews_share_one_request() {
        let (reviews, asked) = (reviews(), AtomicU32::new(0));
        let one = || {
            reviews.get([1; 32], async {
                tokio::time::sleep(Duration::from_secs(1)).await;
                Ok::<_, ()>((asked.fetch_add(1, Ordering::Relaxed), Duration::from_secs(10)))
            })
        };
        assert_eq!(tokio::join!(one(), one(), one()), (Ok(0), Ok(0), Ok(0)));
        assert_eq!(asked.load(Ordering::Relaxed), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn review_cache_is_bounded() {
        let reviews = reviews();
        for number in 0..10 * u32::try_from(KEPT).unwrap() {
            let mut question = [0; 32];
            question[..4].copy_from_slice(&number.to_le_bytes());
            reviews.get(question, async { Ok::<_, ()>((number, Duration::from_secs(60))) }).await.unwrap();
        }
        assert_eq!(reviews.answers.lock().unwrap().len(), KEPT);
    }
}
