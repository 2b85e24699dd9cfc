//! A cache of reviews by the API server.
//!
//! Owns: how long a review is cached, sharing one request between concurrent callers, the maximum of running and waiting
//! requests and of entries.
//! Upstream: `cachedTokenAuthenticator`, the LRU of the authorizer's webhook.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rubelet_core::time::Uptime;
use tokio::sync::OnceCell;

use super::turns::{TurnLimits, Turns};
use crate::{server::unauthenticated::PeerAddress, world::Clock};

/// A token or a set of attributes, as SHA-256: the cache holds no secret.
pub(super) type Question = [u8; 32];

/// Enough for every monitor and controller that calls a node, and small if a client tries many tokens.
const KEPT: usize = 1024;

/// A client that tries many tokens delays its own address only: a quarter of the reviews may be for one address. As many
/// wait as unauthenticated connections may be open, as long as a review may take.
const REVIEWS: TurnLimits = TurnLimits {
    running: 32,
    running_per_address: 8,
    waiting: 256,
    waiting_per_address: 32,
    wait_timeout: Duration::from_secs(10),
};

#[derive(Debug)]
pub(super) struct Reviews<T> {
    clock: Clock,
    turns: Arc<Turns>,
    is_positive: fn(&T) -> bool,
    answers: Mutex<BTreeMap<Question, Arc<OnceCell<Answer<T>>>>>,
}

#[derive(Debug)]
struct Answer<T> {
    answer: T,
    until: Uptime,
}

impl<T: Clone> Reviews<T> {
    /// Positive answers stay in a full cache: clients without credentials cannot cause them.
    pub(super) fn new(clock: Clock, is_positive: fn(&T) -> bool) -> Self {
        Reviews { clock, turns: Turns::new(REVIEWS), is_positive, answers: Mutex::default() }
    }

    /// The cached review, or the result of `ask` with its cache time. An error is not cached.
    pub(super) async fn get(
        &self,
        question: Question,
        peer: PeerAddress,
        ask: impl Future<Output = Result<(T, Duration), String>>,
    ) -> Result<T, String> {
        let cell = self.cell(question);
        let asked = cell.get_or_try_init(|| async {
            let _turn = self.turns.acquire(peer).await?;
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
            let is_positive =
                |cell: &OnceCell<Answer<T>>| cell.get().is_some_and(|kept| (self.is_positive)(&kept.answer));
            let other = answers.iter().find(|(_, cell)| !is_positive(cell)).map(|(key, _)| *key);
            match other {
                Some(key) => answers.remove(&key),
                None => answers.pop_first().map(|(_, cell)| cell),
            };
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

    const PEER: PeerAddress = PeerAddress::UNKNOWN;

    /// Zero is the negative answer.
    fn reviews() -> Reviews<u32> {
        Reviews::new(Clock::simulated(jiff::Timestamp::UNIX_EPOCH, Arc::default()), |answer| *answer > 0)
    }

    fn numbered(number: u32) -> Question {
        let mut question = [0; 32];
        question[..4].copy_from_slice(&number.to_le_bytes());
        question
    }

    #[tokio::test(start_paused = true)]
    async fn reviews_are_cached_but_errors_are_not() {
        let reviews = reviews();
        let keep = Duration::from_secs(10);
        let away = || "away".to_owned();
        assert_eq!(reviews.get([1; 32], PEER, async { Err(away()) }).await, Err(away()));
        assert_eq!(reviews.get([1; 32], PEER, async { Ok((1, keep)) }).await, Ok(1));
        assert_eq!(reviews.get([1; 32], PEER, async { Ok((2, keep)) }).await, Ok(1));
        assert_eq!(reviews.get([2; 32], PEER, async { Ok((3, keep)) }).await, Ok(3));
        tokio::time::sleep(keep).await;
        assert_eq!(reviews.get([1; 32], PEER, async { Err(away()) }).await, Err(away()));
        assert_eq!(reviews.get([1; 32], PEER, async { Ok((4, keep)) }).await, Ok(4));
    }

    #[tokio::test(start_paused = true)]
    async fn concurrent_equal_reviews_share_one_request() {
        let (reviews, asked) = (reviews(), AtomicU32::new(0));
        let one = || {
            reviews.get([1; 32], PEER, async {
                tokio::time::sleep(Duration::from_secs(1)).await;
                Ok((asked.fetch_add(1, Ordering::Relaxed), Duration::from_secs(10)))
            })
        };
        assert_eq!(tokio::join!(one(), one(), one()), (Ok(0), Ok(0), Ok(0)));
        assert_eq!(asked.load(Ordering::Relaxed), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn review_cache_is_bounded() {
        let reviews = reviews();
        for number in 0..10 * u32::try_from(KEPT).unwrap() {
            let answer = async { Ok((number, Duration::from_secs(60))) };
            reviews.get(numbered(number), PEER, answer).await.unwrap();
        }
        assert_eq!(reviews.answers.lock().unwrap().len(), KEPT);
    }

    #[tokio::test(start_paused = true)]
    async fn rejected_tokens_do_not_displace_accepted_ones() {
        let (reviews, keep) = (reviews(), Duration::from_secs(60));
        reviews.get(numbered(0), PEER, async { Ok((7, keep)) }).await.unwrap();
        for number in 1..3 * u32::try_from(KEPT).unwrap() {
            reviews.get(numbered(number), PEER, async { Ok((0, keep)) }).await.unwrap();
        }
        let again = reviews.get(numbered(0), PEER, async { Err("asked again".to_owned()) });
        assert_eq!(again.await, Ok(7));
    }

    #[tokio::test(start_paused = true)]
    async fn reviews_of_one_address_do_not_delay_another_one() {
        let reviews = Arc::new(reviews());
        for number in 0..100 {
            let reviews = reviews.clone();
            tokio::spawn(async move { reviews.get(numbered(number), PEER, std::future::pending()).await });
        }
        tokio::task::yield_now().await;
        let other = PeerAddress::from(std::net::IpAddr::from([10, 0, 0, 1]));
        let asked = reviews.get(numbered(1_000), other, async { Ok((1, Duration::ZERO)) });
        assert_eq!(tokio::time::timeout(Duration::ZERO, asked).await, Ok(Ok(1)));
    }
}
