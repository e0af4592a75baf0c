//! The worker process: `commands/run.rs` and `session.rs` without their I/O, on the real core.
//!
//! [`Worker::step`] is one step of the way to a stream, or one turn of the session's loop; a crash, a
//! stall or another worker can come between any two.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use outbox_tailer::relay::line::{Bounds, DeliveryError, Line, Report, Status, Write};
use outbox_tailer::relay::outbox::{ColumnName, Mapping};
use outbox_tailer::relay::progress::Position;
use outbox_tailer::relay::router::{Limits, Record, Route, Timestamp, Topic, TopicName};
use outbox_tailer::relay::truth::Truth;
use outbox_tailer::relay::{Lsn, Output, Relay, Table};
use outbox_tailer::startcheck::{self, Facts, Held, NoStart, Slot, System};

use crate::broker::PARTITIONS;
use crate::server::{Event, Message, Row};
use crate::wire::OUTBOX_OID;
use crate::world::{Env, Statement, note};

const TICK: Duration = Duration::from_secs(1);

pub struct Worker {
    pub name: char,
    /// The server that its configuration names.
    pub server: usize,
    pub phase: Phase,
    pub stalled: bool,
    /// What outlives a session.
    pub memory: Option<Held>,
    wait_until: Duration,
}

pub enum Phase {
    /// No process.
    Down,
    Idle,
    Preparing(Box<Prepare>),
    Streaming(Box<Session>),
    Refused,
}

/// The way from nothing to a running stream.
pub struct Prepare {
    step: u8,
    incarnation: u32,
    slot: Option<Slot>,
    row: Option<Row>,
    system: Option<(System, Vec<(u32, Lsn)>)>,
    held: Vec<Held>,
    phantom: Option<(Lsn, Lsn)>,
    from: Lsn,
    connection: Option<usize>,
}

pub struct Session {
    pub line: Line,
    pub connection: usize,
    pub producer: usize,
    pub epoch: i64,
    incarnation: u32,
    /// What the position row says by all we know: the old value of the next compare-and-swap.
    position: u64,
    pub record: Held,
    pub keeper: Option<Task<Position>>,
    pub notary: Option<Task<Lsn>>,
    buffer: VecDeque<Message>,
    /// Why it ends once it is over.
    why: Option<String>,
    began: Duration,
    ticked: Duration,
}

/// A request to another task, and its result once it is there.
pub struct Task<T> {
    pub request: T,
    pub result: Option<Outcome>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Busy,
    /// The answer is an error; what was asked for may have been done or not.
    Error,
}

impl Worker {
    pub fn new(name: char, server: usize) -> Self {
        let phase = Phase::Idle;
        Worker { name, server, phase, stalled: false, memory: None, wait_until: Duration::ZERO }
    }

    pub fn step(&mut self, env: &mut Env) {
        if self.stalled || env.now < self.wait_until {
            return;
        }
        match &mut self.phase {
            Phase::Down | Phase::Refused => {}
            Phase::Idle => self.phase = Phase::Preparing(Box::new(Prepare::new(env, self.server))),
            Phase::Preparing(prepare) => match prepare.step(env, self.server, &mut self.memory) {
                Ok(None) => {}
                Ok(Some(session)) => {
                    note!(env, "{} streams from {}, epoch {}", self.name, session.position, session.epoch);
                    self.phase = Phase::Streaming(Box::new(session));
                }
                Err(why) => {
                    note!(env, "{} does not start: {why}", self.name);
                    prepare.abandon(env);
                    match why {
                        NoStart::NotYet(_) => self.wait(env),
                        why => {
                            env.refused(self.server, &why);
                            self.phase = Phase::Refused;
                        }
                    }
                }
            },
            Phase::Streaming(session) => {
                if let Some(end) = session.turn(env) {
                    self.end(env, end);
                }
            }
        }
    }

    fn end(&mut self, env: &mut Env, end: End) {
        let Phase::Streaming(session) = &mut self.phase else { return };
        note!(env, "{} ends its session: {end}", self.name);
        if let Some(held) = &mut self.memory {
            held.lsn = session.line.truth.position();
            held.requested = Some(session.line.truth.requested());
        }
        session.drop_all(env);
        match end {
            End::Stopped => self.exit(),
            End::Failed(_) => self.wait(env),
            End::Refused(why) => {
                env.refused(self.server, &why);
                self.phase = Phase::Refused;
            }
        }
    }

    fn wait(&mut self, env: &mut Env) {
        self.phase = Phase::Idle;
        self.wait_until = env.now + Duration::from_millis(env.rng.u64(0..20));
    }

    /// SIGKILL: what is on the wire may arrive, all else is gone.
    pub fn kill(&mut self, env: &mut Env) {
        match &mut self.phase {
            Phase::Preparing(prepare) => prepare.abandon(env),
            Phase::Streaming(session) => session.drop_all(env),
            _ => {}
        }
        self.exit();
    }

    fn exit(&mut self) {
        self.phase = Phase::Down;
        self.memory = None;
        self.stalled = false;
    }

    /// SIGTERM.
    pub fn stop(&mut self, env: &mut Env) {
        match &mut self.phase {
            Phase::Streaming(session) => {
                let now = env.now - session.began;
                if !session.line.is_ending() {
                    session.line.end(now, true);
                }
            }
            _ => self.kill(env),
        }
    }

    /// Nothing happens for a long time, but for the ticks.
    pub fn idle(&mut self, env: &mut Env) {
        if let Phase::Streaming(session) = &mut self.phase
            && !session.lasts(env)
        {
            self.end(env, End::Failed("nothing is acknowledged".to_owned()));
        }
    }

    pub fn session(&mut self) -> Option<&mut Session> {
        match &mut self.phase {
            Phase::Streaming(session) => Some(session),
            _ => None,
        }
    }
}

impl Prepare {
    fn new(env: &Env, server: usize) -> Self {
        Prepare {
            step: 0,
            incarnation: env.servers[server].incarnation,
            slot: None,
            row: None,
            system: None,
            held: vec![],
            phantom: None,
            from: Lsn::from(0),
            connection: None,
        }
    }

    fn abandon(&self, env: &mut Env) {
        if let Some(connection) = self.connection {
            env.connections[connection].abandoned = true;
        }
    }

    fn step(
        &mut self,
        env: &mut Env,
        at: usize,
        memory: &mut Option<Held>,
    ) -> Result<Option<Session>, NoStart> {
        let lost = || NoStart::NotYet("the connection is lost".to_owned());
        if env.servers[at].incarnation != self.incarnation || env.faulty(1) {
            return Err(lost());
        }
        let server = &env.servers[at];
        self.step += 1;
        match self.step {
            // C before P: whatever is confirmed was persisted before.
            1 => self.slot = server.slot_facts(),
            2 => self.row = Some(server.row.clone()),
            3 => self.system = Some((server.system(), server.history.clone())),
            4 => {
                self.held = memory.iter().cloned().collect();
                match self.judge(self.slot.as_ref()) {
                    Err(NoStart::Ahead(_)) if env.settings.witness => {} // it may know
                    judged => {
                        judged?;
                    }
                }
            }
            // W before P, too.
            5 => self.held.extend(env.witness.clone()),
            6 => self.row = Some(server.row.clone()),
            7 => {
                self.system = Some((server.system(), server.history.clone()));
                let start = self.judge(self.slot.as_ref())?;
                (self.from, self.phantom) = (start.from, start.phantom);
            }
            8 => {
                let Some(slot) = &server.slot else { return Err(lost()) };
                if slot.active.is_some() {
                    return Err(NoStart::NotYet("the slot is in use".to_owned()));
                }
                self.connection = Some(env.start_replication(at, self.from.into()));
            }
            9 => {
                self.slot = server.slot_facts();
                if let Some(slot) = &mut self.slot {
                    slot.active_pid = None;
                }
            }
            10 => {
                let row = self.row.as_ref().expect("read before");
                if (row.epoch, row.position) != (server.row.epoch, server.row.position) {
                    return Err(NoStart::NotYet("another worker was faster".to_owned()));
                }
                self.from = self.judge(self.slot.as_ref())?.from;
            }
            _ => return self.take(env, at, memory).map(Some),
        }
        Ok(None)
    }

    fn judge(&self, slot: Option<&Slot>) -> Result<startcheck::Start, NoStart> {
        let (system, history) = self.system.as_ref().expect("asked before");
        startcheck::judge(&Facts {
            slot_name: "s",
            database: "db",
            system,
            history,
            slot,
            row: self.row.as_ref().map(Row::facts),
            held: &self.held,
        })
    }

    fn take(&self, env: &mut Env, at: usize, memory: &mut Option<Held>) -> Result<Session, NoStart> {
        let not_yet = |why: &str| NoStart::NotYet(why.to_owned());
        let row = self.row.as_ref().expect("asked before");
        let connection = self.connection.expect("started before");
        let known = self.held.iter().map(|held| held.epoch).max().unwrap_or(0);
        let instance = env.instance();
        let unseen = env.faulty(4);
        let server = &mut env.servers[at];
        if (server.row.epoch, server.row.position) != (row.epoch, row.position) {
            return Err(not_yet("another worker took the position at the same time"));
        }
        server.row.position = self.from.into();
        server.row.epoch = row.epoch.max(known) + 1;
        server.row.instance.clone_from(&instance);
        server.row.timeline = server.timeline;
        if unseen {
            return Err(not_yet("no answer to the statement that takes the position"));
        }
        let (system, history) = self.system.clone().expect("asked before");
        let record = Held {
            system_identifier: system.identifier,
            timeline: system.timeline,
            history,
            lsn: self.from,
            requested: None,
            epoch: server.row.epoch,
            instance,
        };
        *memory = Some(Held { requested: Some(record.lsn), ..record.clone() });
        env.started(at, connection, self.from.into(), self.phantom, &self.held);
        let witness = env.settings.witness.then_some(Lsn::from(0));
        Ok(Session {
            line: Line::new(relay(), Truth::new(record.lsn, witness), env.settings.bounds),
            connection,
            producer: env.broker.connect(),
            epoch: record.epoch,
            incarnation: self.incarnation,
            position: self.from.into(),
            record,
            keeper: None,
            notary: None,
            buffer: VecDeque::new(),
            why: None,
            began: env.now,
            ticked: env.now,
        })
    }
}

enum End {
    Stopped,
    Failed(String),
    Refused(NoStart),
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            End::Stopped => write!(f, "it was asked to"),
            End::Failed(why) => write!(f, "{why}"),
            End::Refused(why) => write!(f, "refused: {why}"),
        }
    }
}

/// What one turn waits for.
#[derive(Clone, Copy)]
enum Ready {
    Keeper,
    Notary,
    Reports,
    Tick,
    Fill,
    SqlGone,
}

impl Session {
    /// One turn of the loop in `session.rs`.
    fn turn(&mut self, env: &mut Env) -> Option<End> {
        let now = env.now - self.began;
        if !self.line.is_ending() {
            self.publish_buffered(env);
        }
        if let Write::Now(position) = self.line.write(now) {
            env.persist_asked(self.connection, position.lsn.into());
            self.keeper = Some(Task { request: position, result: None });
        }
        if env.settings.witness
            && let Some(lsn) = self.line.truth.witness()
        {
            self.notary = Some(Task { request: lsn, result: None });
        }
        let due = self.line.due_status(now);
        self.tell(env, due);
        if self.line.is_over(now) {
            let last = self.line.status(now, false);
            self.tell(env, last);
            return Some(match self.why.take() {
                Some(why) => End::Failed(why),
                None => End::Stopped,
            });
        }
        let reading = self.line.reads(now);
        let ready = self.ready(env, reading);
        match *env.rng.choice(&ready)? {
            Ready::Keeper => {
                let Task { request, result } = self.keeper.take()?;
                match result {
                    Some(Outcome::Done) => {
                        self.position = request.lsn.into();
                        self.line.persisted(request.lsn, now);
                    }
                    Some(Outcome::Busy) => self.line.not_persisted(now),
                    _ => return Some(self.explain(env)),
                }
            }
            Ready::Notary => {
                let Task { request, result } = self.notary.take()?;
                if result != Some(Outcome::Done) {
                    return Some(End::Failed("the witness cannot be written".to_owned()));
                }
                self.line.witnessed(request);
            }
            Ready::Reports => {
                for report in env.broker.take_reports(self.producer) {
                    self.report(env, report);
                }
            }
            Ready::Tick => {
                self.ticked = env.now;
                match self.line.tick(now) {
                    Ok(status) => self.tell(env, status),
                    Err(lost) => return Some(End::Failed(format!("{lost:?}"))),
                }
            }
            Ready::Fill => {
                let connection = &mut env.connections[self.connection];
                if connection.socket.is_empty() {
                    return Some(End::Failed("the stream has ended".to_owned()));
                }
                let some = env.rng.usize(1..=connection.socket.len());
                self.buffer.extend(connection.socket.drain(..some));
                self.line.heard(now);
            }
            Ready::SqlGone => return Some(End::Failed("the SQL session has ended".to_owned())),
        }
        None
    }

    fn ready(&self, env: &Env, reading: bool) -> Vec<Ready> {
        let connection = &env.connections[self.connection];
        let readable = !connection.black_hole && (connection.closed || !connection.socket.is_empty());
        let at = connection.server;
        let candidates = [
            (Ready::Keeper, self.keeper.as_ref().is_some_and(|task| task.result.is_some())),
            (Ready::Notary, self.notary.as_ref().is_some_and(|task| task.result.is_some())),
            (Ready::Reports, env.broker.has_reports(self.producer)),
            (Ready::Tick, env.now >= self.ticked + TICK),
            (Ready::Fill, reading && readable),
            (Ready::SqlGone, env.servers[at].incarnation != self.incarnation),
        ];
        candidates.iter().filter(|(_, is_ready)| *is_ready).map(|(ready, _)| *ready).collect()
    }

    fn publish_buffered(&mut self, env: &mut Env) {
        let now = env.now - self.began;
        while self.line.has_room() {
            let Some(message) = self.buffer.pop_front() else { return };
            match message {
                Message::Wal { lsn, bytes } => {
                    let output = self.line.wal(Lsn::from(lsn), &bytes, now);
                    let Some(output) = output.unwrap_or_else(|e| panic!("{e}")) else { continue };
                    let Output::Publish { seq, record } = output else { panic!("nothing is skipped") };
                    let (partition, event) = (record.partition as usize, event(&record));
                    note!(env, "event {} of key {} is sent as number {seq}", event.id, event.key);
                    if env.broker.send(self.producer, partition, seq, event).is_err() {
                        let why = DeliveryError::Other("the producer has given up".to_owned());
                        self.report(env, Report::Failed { seq, why: Box::new(why) });
                        return;
                    }
                }
                Message::Keepalive { wal_end, reply_requested } => {
                    let taken = self.line.keepalive(Lsn::from(wal_end), reply_requested);
                    taken.unwrap_or_else(|e| panic!("{e}"));
                }
            }
        }
    }

    fn report(&mut self, env: &mut Env, report: Report) {
        if let Err(fault) = self.line.report(report, env.now - self.began) {
            env.broker.purge(self.producer);
            self.why = Some(format!("{fault:?}"));
        }
    }

    fn tell(&self, env: &mut Env, status: Option<Status>) {
        if let Some(status) = status {
            assert!(status.flushed <= status.received, "{status:?} tells more than was received");
            env.connections[self.connection].statuses.push_back(status);
        }
    }

    /// Why the row did not move, or why nobody knows whether it did.
    fn explain(&self, env: &Env) -> End {
        let server = &env.servers[env.connections[self.connection].server];
        let row = &server.row;
        if server.incarnation == self.incarnation
            && row.epoch == self.epoch
            && row.position != self.position
            && row.position != self.requested()
        {
            return End::Refused(NoStart::ByHand("the position was changed by another hand".to_owned()));
        }
        End::Failed("the position was not moved, or nobody knows".to_owned())
    }

    fn requested(&self) -> u64 {
        self.line.truth.requested().into()
    }

    /// Everything in flight ends with the session.
    fn drop_all(&mut self, env: &mut Env) {
        env.broker.purge(self.producer);
        env.connections[self.connection].abandoned = true;
        env.left.extend(self.statement(env));
        if let Some(Task { request, result: None }) = &self.notary {
            env.late_witness.push(Held { lsn: *request, ..self.record.clone() });
        }
    }

    /// The statement for the keeper's request.
    pub fn statement(&self, env: &Env) -> Option<Statement> {
        let task = self.keeper.as_ref().filter(|task| task.result.is_none())?;
        let server = env.connections[self.connection].server;
        let to = task.request.lsn.into();
        (env.servers[server].incarnation == self.incarnation).then_some(Statement {
            server,
            epoch: self.epoch,
            from: self.position,
            to,
        })
    }

    /// Time goes by, with a keepalive now and then. Gives whether the session lasts.
    fn lasts(&mut self, env: &mut Env) -> bool {
        let now = env.now - self.began;
        self.line.heard(now);
        match self.line.tick(now) {
            Ok(status) => self.tell(env, status),
            Err(_) => return false,
        }
        true
    }
}

fn relay() -> Relay {
    let limits = Limits { topic: Some(1000), client: 1000, compressed: false };
    let topic = TopicName { name: "t".into(), partitions: PARTITIONS as i32, limits };
    let mapping = Mapping {
        schema: "public".into(),
        table: "outbox".into(),
        oid: OUTBOX_OID,
        id: ColumnName::new("id"),
        key: ColumnName::new("key"),
        payload: ColumnName::new("payload"),
        headers: vec![],
    };
    let route = Route { topic: Topic::Fixed(topic), timestamp: Timestamp::Produce };
    Relay::new(vec![Table { mapping, route }], BTreeSet::new())
}

fn event(record: &Record<'_>) -> Event {
    let number = |bytes: &[u8]| std::str::from_utf8(bytes).ok()?.parse::<u32>().ok();
    let id = record.headers[0].1.and_then(number).expect("an id");
    Event { id, key: number(record.key).expect("a key") as u8 }
}

/// What a session keeps within.
pub fn bounds(rng: &mut fastrand::Rng) -> Bounds {
    Bounds {
        window_events: rng.usize(1..12),
        window_bytes: 1000,
        alone_over_bytes: 1000,
        knows_limits: true,
        position_interval: Duration::from_millis(rng.u64(0..50)),
        idle_interval: Duration::from_millis(500),
        status_interval: Duration::from_secs(10),
        silence_timeout: Duration::from_secs(30),
        shutdown_timeout: Duration::from_secs(2),
    }
}
