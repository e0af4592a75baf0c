//! A wire with faults: passes TCP on to one server, and spoils it when told to.
//!
//! Two threads serve a connection, one for each direction. A fault that needs a certain moment waits
//! for bytes that somebody says on the wire ([`Proxy::when`]), so that tests need no clock.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    ToServer,
    ToClient,
}
use Way::{ToClient, ToServer};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing more comes through, the connection stays.
    Hold(Way),
    /// The connection ends at once on both sides, after so many more bytes of this direction.
    Cut(Way, u64),
    /// The byte after so many is another one: these bits of it are turned.
    Corrupt(Way, u64, u8),
}

/// A fault that waits for its moment.
struct Trigger {
    way: Way,
    said: Vec<u8>,
    fault: Fault,
}

#[derive(Default)]
struct Connection {
    /// What the client has said first, by which tests find it.
    opening: Vec<u8>,
    held: [bool; 2],
    cut: [Option<u64>; 2],
    corrupt: [Option<u64>; 2],
    turned: u8,
    over: bool,
    ends: Vec<TcpStream>,
}

#[derive(Default)]
struct State {
    upstream: u16,
    /// New connections are taken and get no answer.
    unanswered: bool,
    /// The server's side stays when the client's ends.
    keeps_upstream: bool,
    delay: Duration,
    bytes_per_s: Option<u64>,
    connections: Vec<Connection>,
    triggers: Vec<Trigger>,
    /// How many faults have come about.
    happened: usize,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

pub struct Proxy {
    pub port: u16,
    shared: Arc<Shared>,
}

impl Proxy {
    /// Serves until the tests end.
    pub fn start(upstream: u16) -> Self {
        Self::start_on(super::servers::free_port(), upstream)
    }

    pub fn start_on(port: u16, upstream: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let shared = Arc::new(Shared::default());
        shared.lock().upstream = upstream;
        let serving = Arc::clone(&shared);
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let serving = Arc::clone(&serving);
                std::thread::spawn(move || serve(&serving, near));
            }
        });
        Proxy { port, shared }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.shared.lock());
        self.shared.changed.notify_all();
    }

    /// To another server, from the next connection on.
    pub fn repoint(&self, upstream: u16) {
        self.change(|state| state.upstream = upstream);
    }

    /// Every chunk is late by so much.
    pub fn delay(&self, delay: Duration) {
        self.change(|state| state.delay = delay);
    }

    /// At most so much in each direction of each connection.
    pub fn throttle(&self, bytes_per_s: Option<u64>) {
        self.change(|state| state.bytes_per_s = bytes_per_s);
    }

    /// The fault, on the living connections whose client said `opening` first; there must be one.
    pub fn spoil(&self, opening: &str, fault: Fault) {
        self.change(|state| {
            let found =
                state.connections.iter_mut().filter(|c| !c.over && has(&c.opening, opening.as_bytes()));
            assert!(
                found.map(|connection| connection.spoil(fault)).count() > 0,
                "no connection with {opening:?}"
            );
        });
    }

    /// The fault once, on the connection on which this is said next, before it is passed on: a cut or a
    /// corruption in the same direction counts from its first byte.
    pub fn when(&self, way: Way, said: &str, fault: Fault) {
        let said = said.as_bytes().to_vec();
        self.change(|state| state.triggers.push(Trigger { way, said, fault }));
    }

    /// Both ways of every connection are held, and new ones get no answer.
    pub fn black_hole(&self) {
        self.change(|state| {
            state.unanswered = true;
            state.connections.iter_mut().for_each(|connection| connection.held = [true; 2]);
        });
    }

    /// From now on a client that goes leaves its server waiting, as if its machine had lost its power.
    pub fn keep_upstream(&self) {
        self.change(|state| state.keeps_upstream = true);
    }

    /// Ends every connection that there is; with what is held, if anything.
    pub fn cut_all(&self) {
        self.change(|state| state.connections.iter_mut().for_each(Connection::end));
    }

    /// No fault any more; what was held goes on.
    pub fn heal(&self) {
        self.change(|state| {
            state.triggers.clear();
            (state.unanswered, state.keeps_upstream) = (false, false);
            (state.delay, state.bytes_per_s) = (Duration::ZERO, None);
            for connection in &mut state.connections {
                (connection.held, connection.cut, connection.corrupt) = Default::default();
            }
        });
    }

    /// Waits until so many faults have come about: something was held up, cut or corrupted.
    pub fn happened(&self, count: usize) {
        super::eventually("the fault on the wire", || (self.shared.lock().happened >= count).then_some(()));
    }
}

impl Connection {
    fn spoil(&mut self, fault: Fault) {
        match fault {
            Fault::Hold(way) => self.held[way as usize] = true,
            Fault::Cut(way, after) => self.cut[way as usize] = Some(after),
            Fault::Corrupt(way, after, bits) => {
                (self.corrupt[way as usize], self.turned) = (Some(after), bits);
            }
        }
    }

    fn end(&mut self) {
        self.over = true;
        for end in self.ends.drain(..) {
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

fn has(text: &[u8], part: &[u8]) -> bool {
    part.is_empty() || text.windows(part.len()).any(|window| window == part)
}

/// One connection to its end; either side may go away at any time.
fn serve(shared: &Arc<Shared>, near: TcpStream) {
    let mut state = shared.lock();
    let number = state.connections.len();
    state.connections.push(Connection { ends: vec![near.try_clone().unwrap()], ..Connection::default() });
    while state.unanswered && !state.connections[number].over {
        state = shared.changed.wait(state).unwrap();
    }
    let upstream = state.upstream;
    drop(state);
    let Ok(far) = TcpStream::connect(("127.0.0.1", upstream)) else {
        return shared.lock().connections[number].end();
    };
    let _ = (near.set_nodelay(true), far.set_nodelay(true));
    shared.lock().connections[number].ends.push(far.try_clone().unwrap());
    let (there, back) = ((near.try_clone().unwrap(), far.try_clone().unwrap()), (far, near));
    let answering = Arc::clone(shared);
    let answers = std::thread::spawn(move || pump(&answering, number, ToClient, back.0, back.1));
    pump(shared, number, ToServer, there.0, there.1);
    let _ = answers.join();
}

fn pump(shared: &Shared, number: usize, way: Way, mut from: TcpStream, mut to: TcpStream) {
    let mut chunk = [0; 16 << 10];
    loop {
        let read = match from.read(&mut chunk) {
            Ok(read) if read > 0 => read,
            _ => break,
        };
        let Some(passed) = pass(shared, number, way, &mut chunk[..read]) else { break };
        if to.write_all(&chunk[..passed]).is_err() || passed < read {
            break;
        }
    }
    let mut state = shared.lock();
    while state.keeps_upstream && !state.connections[number].over {
        state = shared.changed.wait(state).unwrap();
    }
    state.connections[number].end();
    drop(state);
    shared.changed.notify_all();
}

/// Waits as told, and gives how much of the chunk may go; `None` when the connection is over.
fn pass(shared: &Shared, number: usize, way: Way, chunk: &mut [u8]) -> Option<usize> {
    let mut state = shared.lock();
    state.pull_triggers(number, way, chunk);
    let connection = &mut state.connections[number];
    if way == ToServer && connection.opening.len() < 1024 {
        connection.opening.extend_from_slice(chunk);
    }
    if connection.held[way as usize] {
        state.happened += 1;
    }
    while state.connections[number].held[way as usize] && !state.connections[number].over {
        state = shared.changed.wait(state).unwrap();
    }
    let pause = state.delay
        + state
            .bytes_per_s
            .map_or(Duration::ZERO, |rate| Duration::from_secs_f64(chunk.len() as f64 / rate as f64));
    if !pause.is_zero() {
        // A change of the faults ends it.
        state = shared.changed.wait_timeout(state, pause).unwrap().0;
    }
    let State { connections, happened, .. } = &mut *state;
    let connection = &mut connections[number];
    if connection.over {
        return None;
    }
    if let Some(after) = due(&mut connection.corrupt[way as usize], chunk.len()) {
        chunk[after] ^= connection.turned;
        *happened += 1;
    }
    let cut = due(&mut connection.cut[way as usize], chunk.len());
    *happened += usize::from(cut.is_some());
    Some(cut.unwrap_or(chunk.len()))
}

/// Where in this chunk the fault is, or how far it still is.
fn due(fault: &mut Option<u64>, chunk: usize) -> Option<usize> {
    let after = fault.take()?;
    let here = usize::try_from(after).ok().filter(|after| *after < chunk);
    if here.is_none() {
        *fault = Some(after - chunk as u64);
    }
    here
}

impl State {
    /// Before what was said is passed on: the answer cannot be faster, and the chunk itself is not spared.
    fn pull_triggers(&mut self, number: usize, way: Way, chunk: &[u8]) {
        let connection = &mut self.connections[number];
        self.triggers.retain(|trigger| {
            let at = chunk.windows(trigger.said.len()).position(|window| window == trigger.said);
            let Some(at) = at.filter(|_| trigger.way == way) else { return true };
            connection.spoil(match trigger.fault {
                Fault::Cut(w, after) if w == way => Fault::Cut(w, at as u64 + after),
                Fault::Corrupt(w, after, bits) if w == way => Fault::Corrupt(w, at as u64 + after, bits),
                fault => fault,
            });
            false
        });
    }
}
