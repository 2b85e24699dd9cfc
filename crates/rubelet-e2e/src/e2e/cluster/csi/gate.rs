//! A gate between the agent and a CSI driver: it withholds the driver's answer to a chosen call of the Node service.
//!
//! Owns: the moment "in the middle of a call": the driver works on it or has done it, and the agent waits for the answer. Only bytes are
//! passed on. Which call they answer is known from the driver's log: a call is in the file before its answer is on the socket.

use std::{
    fs::{self, File},
    io::{self, Read as _, Seek as _, SeekFrom},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use anyhow::ensure;
use rubelet_testbed::clock;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, copy},
    net::{UnixListener, UnixStream, unix},
};

use crate::{background::BackgroundServer, e2e::lock};

/// In the driver's log, before the name of a call that begins.
const BEGINS: &str = "GRPC call: /csi.v1.Node/";
/// The same of one that has ended, just before its answer is sent.
const ENDS: &str = "gRPCCall: {\"Method\":\"/csi.v1.Node/";

#[derive(Debug)]
pub struct Gate {
    passage: Arc<Passage>,
    _server: BackgroundServer,
}

/// What connections share.
#[derive(Debug)]
struct Passage {
    /// The driver's socket.
    driver: PathBuf,
    /// The driver's log.
    log: PathBuf,
    hold: Mutex<Hold>,
}

#[derive(Debug, Default)]
struct Hold {
    /// The call whose answer is withheld.
    call: Option<&'static str>,
    /// How much of the log is known to be without it.
    read: u64,
    /// It is in the log.
    is_seen: bool,
    /// Connections up to this number get no more answers.
    last_lost: u64,
    connections: u64,
}

impl Gate {
    /// Listens at `socket`.
    pub fn start(socket: &Path, driver: PathBuf, log: PathBuf) -> anyhow::Result<Self> {
        let _ = fs::remove_file(socket);
        let passage = Arc::new(Passage { driver, log, hold: Mutex::default() });
        let served = Arc::clone(&passage);
        let connect = move |agent| connect(agent, Arc::clone(&served));
        let server = BackgroundServer::start(|| UnixListener::bind(socket), connect)?;
        Ok(Gate { passage, _server: server })
    }

    /// Withholds the answer to the next call of this name, and everything that comes after it on any connection of that time. Without a
    /// name, new connections get all answers.
    pub fn hold(&self, call: Option<&'static str>) {
        let mut hold = lock(&self.passage.hold);
        (hold.call, hold.read, hold.is_seen) = (call, self.passage.log_size(), false);
    }

    /// Waits until the driver has begun the call; returns where the log goes on after it.
    pub fn wait_begun(&self, limit: Duration) -> anyhow::Result<u64> {
        let call = lock(&self.passage.hold).call.unwrap_or("a call");
        let wait = format!("the driver begins {call}");
        clock::wait(&wait, limit, Duration::from_millis(1), || {
            let mut hold = lock(&self.passage.hold);
            self.passage.look(&mut hold)?;
            ensure!(hold.is_seen, "it is not in the driver's log");
            Ok(hold.read)
        })
    }

    /// Waits until the driver has done the call that began before this place of the log.
    pub fn wait_done(&self, call: &str, begun: u64, limit: Duration) -> anyhow::Result<()> {
        self.wait_logged(&format!("{ENDS}{call}\""), begun, limit)
    }

    /// Waits until the call comes once more after this place of the log.
    pub fn wait_again(&self, call: &str, begun: u64, limit: Duration) -> anyhow::Result<()> {
        self.wait_logged(&format!("{BEGINS}{call}\n"), begun, limit)
    }

    fn wait_logged(&self, text: &str, from: u64, limit: Duration) -> anyhow::Result<()> {
        let wait = format!("the driver logs {}", text.trim_end());
        clock::wait(&wait, limit, Duration::from_millis(10), || {
            let log = self.passage.log_from(from)?;
            ensure!(log.contains(text), "the log ends with {:?}", log.lines().last());
            Ok(())
        })
    }
}

impl Passage {
    fn log_size(&self) -> u64 {
        fs::metadata(&self.log).map_or(0, |log| log.len())
    }

    fn log_from(&self, start: u64) -> io::Result<String> {
        let mut text = String::new();
        match File::open(&self.log) {
            Err(err) if err.kind() == io::ErrorKind::NotFound => {}
            Err(err) => return Err(err),
            Ok(mut log) => {
                log.seek(SeekFrom::Start(start))?;
                log.read_to_string(&mut text)?;
            }
        }
        Ok(text)
    }

    /// Reads on in the log for the call that is to be held.
    fn look(&self, hold: &mut Hold) -> io::Result<()> {
        let Some(call) = hold.call.filter(|_| !hold.is_seen) else { return Ok(()) };
        let log = self.log_from(hold.read)?;
        let line = format!("{BEGINS}{call}\n");
        if let Some(begin) = log.find(&line) {
            hold.read += (begin + line.len()) as u64;
            hold.is_seen = true;
            hold.last_lost = hold.connections;
        } else {
            // The last line may be incomplete.
            hold.read += log.rfind('\n').map_or(0, |end| end + 1) as u64;
        }
        Ok(())
    }

    /// Whether a connection gets what the driver has just sent.
    fn lets_pass(&self, connection: u64) -> bool {
        let mut hold = lock(&self.hold);
        // A log that cannot be read fails the test where it waits for the call.
        let _ = self.look(&mut hold);
        !hold.is_seen && connection > hold.last_lost
    }
}

/// Until one side has ended, as a connection ends when the other's process does.
async fn connect(mut agent: UnixStream, passage: Arc<Passage>) {
    let number = {
        let mut hold = lock(&passage.hold);
        hold.connections += 1;
        hold.connections
    };
    // While there is no driver, the agent sees its connection closed.
    let Ok(mut driver) = UnixStream::connect(&passage.driver).await else { return };
    let (mut from_agent, to_agent) = agent.split();
    let (from_driver, mut to_driver) = driver.split();
    tokio::select! {
        biased;
        // Neither is polled again, because both sides are closed then.
        _ = copy(&mut from_agent, &mut to_driver) => {}
        _ = answers(from_driver, to_agent, number, &passage) => {}
    }
}

/// Once bytes were withheld, those after them make no sense to the agent.
async fn answers(
    mut driver: unix::ReadHalf<'_>,
    mut agent: unix::WriteHalf<'_>,
    number: u64,
    passage: &Passage,
) -> io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    let mut is_lost = false;
    loop {
        let length = driver.read(&mut buffer).await?;
        if length == 0 {
            return Ok(());
        }
        is_lost = is_lost || !passage.lets_pass(number);
        if !is_lost {
            agent.write_all(&buffer[..length]).await?;
        }
    }
}
