//! One history: everything around the workers, what happens next, and what must hold at each step.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use fastrand::Rng;
use outbox_tailer::relay::Lsn;
use outbox_tailer::relay::line::Bounds;
use outbox_tailer::startcheck::{Held, NoStart};

use crate::broker::{Broker, PARTITIONS};
use crate::server::{Connection, Event, Server};
use crate::worker::{self, Outcome, Phase, Task, Worker};

/// One line of a history that is being looked at.
macro_rules! note {
    ($env:expr, $($what:tt)*) => {
        if $env.trace {
            eprintln!("{:>10.3?} {}", $env.now, format_args!($($what)*));
        }
    };
}
pub(crate) use note;

const KEYS: u8 = 4;

/// What another hand does once in some histories. From then on a start has to be refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Foreign {
    AdvanceSlot,
    RecreateSlot,
    DropSlot,
    /// A standby without the slot is promoted.
    PromoteWithoutSlot,
    /// Another standby takes the place of the promoted one, on a timeline of the same number.
    Fork,
    /// The data directory is put back from a copy.
    Restore,
    /// A copy runs beside the original, with a worker of its own.
    Clone,
}

const FOREIGN: [Foreign; 7] = [
    Foreign::AdvanceSlot,
    Foreign::RecreateSlot,
    Foreign::DropSlot,
    Foreign::PromoteWithoutSlot,
    Foreign::Fork,
    Foreign::Restore,
    Foreign::Clone,
];

/// What this history is made of; each fault is left out of some, so that others get further.
pub struct Settings {
    pub bounds: Bounds,
    pub witness: bool,
    foreign: Option<Foreign>,
    steps: usize,
    workers: usize,
    faults: [u32; FAULTS.len()],
}

#[derive(Debug, Clone, Copy)]
enum Fault {
    /// A statement, a question or a connection fails at any time.
    Sql,
    Kafka,
    Witness,
    Kill,
    Stop,
    Cut,
    BlackHole,
    Stall,
    Crash,
    Promote,
    Idle,
}

const FAULTS: [Fault; 11] = [
    Fault::Sql,
    Fault::Kafka,
    Fault::Witness,
    Fault::Kill,
    Fault::Stop,
    Fault::Cut,
    Fault::BlackHole,
    Fault::Stall,
    Fault::Crash,
    Fault::Promote,
    Fault::Idle,
];

impl Settings {
    fn new(rng: &mut Rng) -> Self {
        let foreign = if rng.u8(..) < 80 { rng.choice(FOREIGN) } else { None };
        let mut faults = FAULTS.map(|_| if rng.bool() { rng.u32(1..8) } else { 0 });
        if foreign == Some(Foreign::Fork) {
            faults[Fault::Promote as usize] = 12; // there has to be a timeline 2 first
        }
        Settings {
            bounds: worker::bounds(rng),
            witness: rng.u8(..) < 200,
            foreign,
            steps: rng.usize(200..1500),
            workers: rng.usize(1..=2),
            faults,
        }
    }
}

/// The statement that moves the position.
#[derive(Debug, Clone, Copy)]
pub struct Statement {
    pub server: usize,
    pub epoch: i64,
    pub from: u64,
    pub to: u64,
}

/// Everything outside of the workers.
pub struct Env {
    pub rng: Rng,
    pub trace: bool,
    pub now: Duration,
    pub settings: Settings,
    /// The first is the original, or what has taken its place; a second one is a clone.
    pub servers: Vec<Server>,
    pub connections: Vec<Connection>,
    pub broker: Broker,
    /// The record outside of the database.
    pub witness: Option<Held>,
    /// Statements and records of sessions that are gone, which may still be carried out.
    pub left: Vec<Statement>,
    pub late_witness: Vec<Held>,
    healing: bool,
    instances: u32,
    standby: Option<Server>,
    backup: Option<Server>,
    events: u32,
    known: Known,
}

/// What only the oracle knows.
#[derive(Default)]
struct Known {
    committed: HashSet<u32>,
    acked: HashSet<u32>,
    visible: HashSet<u32>,
    /// Of the first server, in the order of the commits.
    order: HashMap<u8, Vec<u32>>,
    /// Per partition, how far the log was looked at.
    looked: [usize; PARTITIONS],
    /// The greatest record that the witness has had, and the greatest position.
    best: Option<Held>,
    witnessed: u64,
    /// Published events end there, and are gone since the WAL was left at the first position.
    phantom: Option<(u64, u64)>,
    promoted: bool,
    foreign: Option<Foreign>,
    /// By server, why no stream may start there.
    must_refuse: [Option<&'static str>; 2],
    refusals: u32,
}

pub struct World {
    env: Env,
    workers: Vec<Worker>,
}

/// What became of a history.
pub struct Ended {
    pub steps: u64,
    pub events: u64,
    pub repeats: u64,
    pub sessions: u64,
    pub foreign: Option<Foreign>,
    pub refused: bool,
}

impl Env {
    /// Whether something fails now, in `n` of 256 cases where it can.
    pub fn faulty(&mut self, n: u8) -> bool {
        !self.healing && self.settings.faults[Fault::Sql as usize] > 0 && self.rng.u8(..) < n
    }

    pub fn instance(&mut self) -> String {
        self.instances += 1;
        format!("i{}", self.instances)
    }

    pub fn start_replication(&mut self, at: usize, from: u64) -> usize {
        let index = self.connections.len();
        let server = &mut self.servers[at];
        self.connections.push(Connection::start(server, at, from));
        if let Some(slot) = &mut server.slot {
            slot.active = Some(index);
        }
        index
    }

    /// A session begins: nothing that it will not be sent may be missing from Kafka.
    pub fn started(
        &mut self,
        at: usize,
        connection: usize,
        position: u64,
        phantom: Option<(Lsn, Lsn)>,
        held: &[Held],
    ) {
        if let Some(why) = self.known.must_refuse[at] {
            panic!("a stream starts, although {why}");
        }
        let start = self.connections[connection].start;
        for transaction in self.servers[at].committed.iter().take_while(|t| t.commit_lsn < start) {
            for event in transaction.events() {
                let id = event.id;
                assert!(
                    self.known.acked.contains(&id),
                    "the stream starts at {start}, event {id} is not published"
                );
            }
        }
        assert!(start == position, "the stream starts at {start}, the position is {position}");
        if let Some((left, to)) = self.known.phantom
            && held.iter().any(|held| u64::from(held.lsn) >= to)
        {
            let told = phantom.is_some_and(|(from, until)| u64::from(from) <= left && u64::from(until) >= to);
            assert!(told, "events in ({left}, {to}] are gone, and {phantom:?} is told");
            self.known.phantom = None;
        }
    }

    pub fn refused(&mut self, at: usize, why: &NoStart) {
        self.known.refusals += 1;
        // After a promotion nothing else proves that a slot ahead of the row was confirmed by us.
        let unproven = self.known.promoted && !self.settings.witness && matches!(why, NoStart::Ahead(_));
        let expected = self.known.foreign.is_some() || self.known.must_refuse[at].is_some() || unproven;
        assert!(expected, "refused without a cause: {why}");
    }

    pub fn persist_asked(&mut self, connection: usize, to: u64) {
        let confirmable = &self.connections[connection].confirmable;
        assert!(
            confirmable.contains(&to),
            "{to} is neither the end of a commit nor a keepalive between them"
        );
    }

    /// Persisted ≤ acknowledged prefix.
    fn execute(&mut self, statement: Statement) -> bool {
        let Statement { server, epoch, from, to } = statement;
        let server = &mut self.servers[server];
        if !server.advance(epoch, from, to) {
            return false;
        }
        let passed = server.committed.iter().skip_while(|t| t.commit_lsn < from);
        for event in passed.take_while(|t| t.commit_lsn < to).flat_map(|t| t.events()) {
            let id = event.id;
            assert!(
                self.known.acked.contains(&id) || self.known.foreign.is_some(),
                "position {to} is persisted, event {id} before it is not acknowledged"
            );
        }
        note!(self, "position {to} is persisted");
        true
    }

    /// Witnessed ≤ persisted.
    fn write_witness(&mut self, at: Option<usize>, record: Held) {
        let position = u64::from(record.lsn);
        if let Some(at) = at {
            let persisted = self.servers[at].row.position;
            assert!(
                position <= persisted || self.known.promoted || self.known.foreign.is_some(),
                "the witness has {position}, the row {persisted}"
            );
        }
        note!(self, "the witness has {position} of epoch {}", record.epoch);
        self.known.witnessed = self.known.witnessed.max(position);
        // Of two records the greater one counts, whichever was written last.
        let rank = |record: &Held| (record.epoch, record.timeline, record.lsn);
        let best = self.known.best.take().into_iter().chain([record]).max_by_key(rank);
        self.known.best.clone_from(&best);
        self.witness = best;
    }

    /// Confirmed ≤ witnessed, persisted.
    fn hear(&mut self, connection: usize) {
        let at = &mut self.connections[connection];
        let server = &mut self.servers[at.server];
        let Some(confirmed) = at.hear(server, &mut self.rng) else { return };
        let (persisted, witnessed) = (server.row.position, self.known.witnessed);
        note!(self, "the slot is confirmed up to {confirmed}");
        if self.known.foreign.is_none() {
            assert!(confirmed <= persisted, "confirmed is {confirmed}, persisted only {persisted}");
            let fits = !self.settings.witness || confirmed <= witnessed;
            assert!(fits, "confirmed is {confirmed}, witnessed only {witnessed}");
        }
    }

    /// The server ends a connection; what has arrived before is heard or not.
    fn close(&mut self, connection: usize) {
        if self.connections[connection].closed {
            return;
        }
        for _ in 0..self.rng.usize(..=self.connections[connection].statuses.len()) {
            self.hear(connection);
        }
        let at = &mut self.connections[connection];
        at.statuses.clear();
        at.closed = true;
        at.socket.truncate(self.rng.usize(..=at.socket.len()));
        if let Some(slot) = &mut self.servers[at.server].slot
            && slot.active == Some(connection)
        {
            slot.active = None;
        }
    }

    fn close_all(&mut self, server: usize) {
        for connection in 0..self.connections.len() {
            if self.connections[connection].server == server {
                self.close(connection);
            }
        }
        self.left.retain(|statement| statement.server != server);
    }

    fn walsender(&self, server: usize) -> Option<usize> {
        self.servers[server].slot.as_ref()?.active
    }

    /// What the log shows: nothing that was not committed, and each key in the order of its commits.
    fn look(&mut self) {
        self.known.acked.extend(self.broker.acked.drain(..));
        for (partition, looked) in self.broker.partitions.iter().zip(&mut self.known.looked) {
            for Event { id, key } in &partition.log[*looked..partition.high] {
                assert!(self.known.committed.contains(id), "event {id} was never committed");
                note!(self, "event {id} of key {key} is in Kafka");
                if !self.known.visible.insert(*id) || self.known.foreign.is_some() {
                    continue;
                }
                let order = self.known.order.get(key).map_or(&[][..], Vec::as_slice);
                // What a promotion has lost has no place in the order.
                let Some(at) = order.iter().position(|other| other == id) else { continue };
                let earlier = order[..at].iter().find(|other| !self.known.visible.contains(other));
                assert!(earlier.is_none(), "event {id} comes before event {earlier:?} of the same key");
            }
            *looked = partition.high;
        }
    }

    /// The application and the server's own life.
    fn work(&mut self) {
        let at = self.rng.usize(..self.servers.len());
        let server = &mut self.servers[at];
        match self.rng.u8(..16) {
            0..3 if server.open.len() < 3 => server.open.push(vec![]),
            3..9 if !server.open.is_empty() => {
                let transaction = self.rng.usize(..server.open.len());
                for _ in 0..self.rng.usize(1..4) {
                    self.events += 1;
                    let event = Event { id: self.events, key: self.rng.u8(..KEYS) };
                    server.insert(transaction, (self.rng.u8(..8) > 0).then_some(event));
                }
            }
            9..11 if !server.open.is_empty() => {
                let transaction = self.rng.usize(..server.open.len());
                server.commit(transaction);
                let committed = server.committed.last().expect("just committed");
                for event in committed.events() {
                    self.known.committed.insert(event.id);
                    if at == 0 {
                        self.known.order.entry(event.key).or_default().push(event.id);
                    }
                }
            }
            11 if !server.open.is_empty() => drop(server.open.swap_remove(0)),
            12 => server.end += self.rng.u64(1..200_000),
            13 => {
                if let Some(slot) = &mut server.slot {
                    slot.saved = slot.confirmed; // a checkpoint
                }
            }
            14 if self.known.foreign.is_none() && self.rng.bool() => self.standby = Some(self.copy()),
            _ => {
                // The slot is synchronised only as far as the standby has the WAL.
                if let (Some(standby), Some(slot)) = (&mut self.standby, &self.servers[0].slot)
                    && let Some(synced) = &mut standby.slot
                    && slot.confirmed <= standby.end
                {
                    synced.confirmed = synced.confirmed.max(slot.confirmed);
                }
            }
        }
    }

    fn copy(&self) -> Server {
        let mut copy = self.servers[0].clone();
        copy.restart(false);
        copy
    }

    fn promote(&mut self) {
        let Some(mut standby) = self.standby.take() else { return };
        self.close_all(0);
        standby.promote(self.servers[0].incarnation + 1);
        note!(self, "promoted: timeline {} from {:?}", standby.timeline, standby.history);
        let left = u64::from(standby.history.last().expect("just left").1);
        // A record of an older timeline says nothing about this one's WAL.
        if let Some(witness) = &self.known.best
            && witness.timeline == self.servers[0].timeline
        {
            let published = u64::from(witness.lsn);
            let mut lost =
                self.servers[0].committed.iter().filter(|t| t.commit_lsn >= left && t.end_lsn <= published);
            let last = lost.rfind(|t| t.events().next().is_some());
            let earlier = self.known.phantom.take();
            self.known.phantom = last.map(|t| (left, t.end_lsn)).or(earlier);
        }
        self.known.promoted = true;
        self.known.witnessed = self.known.witnessed.min(left);
        self.replace(standby);
    }

    fn replace(&mut self, server: Server) {
        self.known.order.clear();
        for event in server.committed.iter().flat_map(|t| t.events()) {
            self.known.order.entry(event.key).or_default().push(event.id);
        }
        self.servers[0] = server;
    }

    fn foreign(&mut self, foreign: Foreign) -> bool {
        let end = self.servers[0].end;
        let position = self.servers[0].row.position;
        let free = self.walsender(0).is_none();
        match foreign {
            // PostgreSQL lets nobody touch a slot in use.
            Foreign::AdvanceSlot if free && end > position => {
                let to = self.rng.u64(position + 1..=end);
                // It stops between two records.
                let cut = self.servers[0].committed.iter().find(|t| (t.commit_lsn..t.end_lsn).contains(&to));
                let to = cut.map_or(to, |t| t.end_lsn);
                let Some(slot) = &mut self.servers[0].slot else { return false };
                slot.confirmed = slot.confirmed.max(to);
            }
            Foreign::RecreateSlot if free && end > position => {
                let Some(slot) = &mut self.servers[0].slot else { return false };
                (slot.confirmed, slot.saved) = (end, end);
            }
            Foreign::DropSlot if free => {
                self.servers[0].slot = None;
                self.known.must_refuse[0] = Some("the slot is gone");
            }
            Foreign::PromoteWithoutSlot => {
                let Some(standby) = &mut self.standby else { return false };
                standby.slot = None;
                self.promote();
                self.known.must_refuse[0] = Some("the slot is gone");
            }
            Foreign::Fork => {
                let Some(mut other) = self.backup.take() else { return false };
                let Some(witness) = &self.known.best else { return false };
                let Some((_, left)) =
                    witness.history.iter().find(|(timeline, _)| *timeline == other.timeline)
                else {
                    return false;
                };
                if *left == Lsn::from(other.end) {
                    return false;
                }
                self.close_all(0);
                while other.timeline < self.servers[0].timeline {
                    other.promote(self.servers[0].incarnation + 1);
                }
                self.known.must_refuse[0] = Some("the timeline is another one of the same number");
                self.replace(other);
            }
            Foreign::Restore => {
                let (Some(mut backup), Some(witness)) = (self.backup.take(), &self.known.best) else {
                    return false;
                };
                let is_old = u64::from(witness.lsn) > backup.row.position || witness.epoch > backup.row.epoch;
                if !is_old || backup.timeline != witness.timeline {
                    return false;
                }
                self.close_all(0);
                backup.incarnation = self.servers[0].incarnation + 1;
                backup.end += self.rng.u64(0..10_000);
                self.known.must_refuse[0] = Some("the database is a restored copy");
                self.replace(backup);
            }
            Foreign::Clone if self.witness.is_some() => {
                let clone = self.copy();
                self.servers.push(clone);
            }
            _ => return false,
        }
        note!(self, "another hand: {foreign:?}");
        (self.standby, self.backup) = (None, None); // what comes of them is another story
        self.known.foreign = Some(foreign);
        true
    }
}

impl World {
    pub fn new(seed: u64, trace: bool) -> Self {
        let mut rng = Rng::with_seed(seed);
        let settings = Settings::new(&mut rng);
        let servers = vec![Server::new(rng.bool())];
        let names = ['A', 'B'];
        let workers = names.into_iter().take(settings.workers).map(|name| Worker::new(name, 0)).collect();
        let env = Env {
            rng,
            trace,
            now: Duration::ZERO,
            settings,
            servers,
            connections: vec![],
            broker: Broker::default(),
            witness: None,
            left: vec![],
            late_witness: vec![],
            healing: false,
            instances: 0,
            standby: None,
            backup: None,
            events: 0,
            known: Known::default(),
        };
        World { env, workers }
    }

    /// # Panics
    /// When something does not hold.
    pub fn run(mut self) -> Ended {
        let steps = self.env.settings.steps;
        let mut foreign_from = self.env.rng.usize(..steps);
        let backup_at = self.env.rng.usize(..steps / 2);
        for step in 0..steps {
            let pause = if self.env.rng.u8(..) < 4 { 3_000_000 } else { 5_000 };
            self.env.now += Duration::from_micros(self.env.rng.u64(0..pause));
            if step == backup_at {
                self.env.backup = Some(self.env.copy());
            }
            if step >= foreign_from
                && let Some(foreign) = self.env.settings.foreign
                && self.env.foreign(foreign)
            {
                foreign_from = usize::MAX;
                if foreign == Foreign::Clone {
                    self.workers.push(Worker::new('C', 1));
                }
            }
            self.step();
            self.env.look();
        }
        let healed = self.heal();
        Ended {
            steps: (steps + healed) as u64,
            events: self.env.known.visible.len() as u64,
            repeats: (self.env.known.looked.iter().sum::<usize>() - self.env.known.visible.len()) as u64,
            sessions: self.env.broker.producers.len() as u64,
            foreign: self.env.known.foreign,
            refused: self.env.known.refusals > 0,
        }
    }

    fn step(&mut self) {
        match self.env.rng.u8(..100) {
            0..12 => self.env.work(),
            12..45 => {
                let worker = self.env.rng.usize(..self.workers.len());
                self.workers[worker].step(&mut self.env);
            }
            45..57 => self.serve(),
            57..63 => self.carry_out(),
            63..68 => self.write_witness(),
            68..94 => {
                let env = &mut self.env;
                if env.rng.u32(..64) < env.settings.faults[Fault::Kafka as usize] {
                    env.broker.fault(&mut env.rng, env.now);
                } else {
                    env.broker.step(&mut env.rng, env.now);
                }
            }
            _ => self.fault(),
        }
    }

    /// The servers send and hear.
    fn serve(&mut self) {
        let env = &mut self.env;
        let at = env.rng.usize(..env.servers.len());
        if let Some(connection) = env.walsender(at) {
            for _ in 0..env.rng.usize(1..4) {
                env.connections[connection].send(&env.servers[at], &mut env.rng);
            }
        }
        let Some(last) = env.connections.len().checked_sub(1) else { return };
        let connection = last - env.rng.usize(..=last.min(2));
        let at = &env.connections[connection];
        if at.closed || at.black_hole {
            // The server may not know that nobody is there.
            if at.black_hole && !at.closed && env.rng.u8(..) < 30 {
                env.close(connection);
            }
        } else if at.abandoned && env.rng.u8(..) < 60 {
            env.close(connection);
        } else {
            env.hear(connection);
        }
    }

    /// A position statement is carried out, of a session or of one that is gone.
    fn carry_out(&mut self) {
        let env = &mut self.env;
        if !env.left.is_empty() && env.rng.u8(..) < 100 {
            let statement = env.left.swap_remove(env.rng.usize(..env.left.len()));
            if env.rng.bool() {
                env.execute(statement);
            }
            return;
        }
        let worker = env.rng.usize(..self.workers.len());
        let Some(session) = self.workers[worker].session() else { return };
        let Some(statement) = session.statement(env) else {
            if let Some(task) = &mut session.keeper {
                task.result = task.result.or(Some(Outcome::Error)); // the server is gone
            }
            return;
        };
        let outcome = match env.rng.u8(..) {
            0..10 if env.faulty(200) => Outcome::Busy,
            10..20 if env.faulty(200) => Outcome::Error,
            20..30 if env.faulty(200) => {
                env.execute(statement);
                Outcome::Error
            }
            _ if env.execute(statement) => Outcome::Done,
            _ => Outcome::Error,
        };
        if let Some(task) = &mut session.keeper {
            task.result = Some(outcome);
        }
    }

    fn write_witness(&mut self) {
        let env = &mut self.env;
        if !env.late_witness.is_empty() && env.rng.u8(..) < 100 {
            let record = env.late_witness.swap_remove(env.rng.usize(..env.late_witness.len()));
            if env.rng.bool() {
                env.write_witness(None, record);
            }
            return;
        }
        let worker = env.rng.usize(..self.workers.len());
        let Some(session) = self.workers[worker].session() else { return };
        let Some(Task { request, result: result @ None }) = &mut session.notary else { return };
        let fails = env.settings.faults[Fault::Witness as usize] > 0 && !env.healing;
        let roll = env.rng.u8(..);
        if !fails || roll >= 10 {
            let at = env.connections[session.connection].server;
            let record = Held { lsn: *request, ..session.record.clone() };
            env.write_witness(Some(at), record);
        }
        *result = Some(if fails && roll < 20 { Outcome::Error } else { Outcome::Done });
    }

    fn fault(&mut self) {
        let env = &mut self.env;
        let at = env.rng.usize(..FAULTS.len());
        if env.rng.u32(..16) >= env.settings.faults[at] {
            return;
        }
        let index = env.rng.usize(..self.workers.len());
        let worker = &mut self.workers[index];
        match FAULTS[at] {
            Fault::Sql | Fault::Witness | Fault::Kafka => {} // where they happen
            Fault::Kill => {
                note!(env, "{} is killed", worker.name);
                worker.kill(env);
                let fresh = Worker::new(worker.name, worker.server);
                self.workers[index] = fresh;
            }
            Fault::Stop if matches!(worker.phase, Phase::Down) => {
                *worker = Worker::new(worker.name, worker.server);
            }
            Fault::Stop => worker.stop(env),
            Fault::Cut | Fault::BlackHole => {
                let Some(session) = worker.session() else { return };
                if let Fault::Cut = FAULTS[at] {
                    env.close(session.connection);
                } else {
                    env.connections[session.connection].black_hole = true;
                }
            }
            Fault::Stall => {
                worker.stalled = !worker.stalled;
                note!(env, "{} stalls: {}", worker.name, worker.stalled);
                // The server waits for a sign of life for so long only.
                if worker.stalled
                    && let Some(session) = worker.session()
                    && env.rng.bool()
                {
                    env.close(session.connection);
                }
            }
            Fault::Crash => {
                let at = env.rng.usize(..env.servers.len());
                note!(env, "server {at} crashes");
                env.close_all(at);
                let rewinds = env.rng.u8(..4) > 0;
                env.servers[at].restart(rewinds);
            }
            Fault::Promote => env.promote(),
            // No process is stopped for a day and wakes up with what it was about to send.
            Fault::Idle if self.workers.iter().any(|worker| worker.stalled) => {}
            Fault::Idle => {
                for hours in [2, 25] {
                    env.now += Duration::from_secs(hours * 3600);
                    self.workers.iter_mut().for_each(|worker| worker.idle(env));
                }
                env.broker.forget(env.now);
                (0..20).for_each(|_| env.work()); // then all at once
            }
        }
    }

    /// No fault any more: what was committed must arrive, or a refusal must say why not.
    fn heal(&mut self) -> usize {
        note!(self.env, "healing");
        self.env.healing = true;
        self.workers.iter_mut().for_each(|worker| worker.stalled = false);
        // Nobody looks at the history of a server but at a start.
        let looks = if self.env.known.foreign.is_some() { 6 } else { 0 };
        for look in 0..looks {
            let index = look % self.workers.len();
            if let Some(session) = self.workers[index].session() {
                let connection = session.connection;
                self.env.close(connection);
            }
            for _ in 0..60 {
                self.calm();
            }
        }
        for round in 0..5000 {
            if self.is_done() {
                self.env.look();
                return round;
            }
            self.calm();
            if round % 100 == 99 {
                self.env.now += Duration::from_secs(10);
            }
        }
        let missing: Vec<u32> = self.missing();
        panic!("it does not heal: events {missing:?} are missing, {:?}", self.env.servers[0].row);
    }

    fn calm(&mut self) {
        let env = &mut self.env;
        env.now += Duration::from_millis(5);
        for at in 0..env.servers.len() {
            if let Some(connection) = env.walsender(at) {
                for _ in 0..4 {
                    env.connections[connection].send(&env.servers[at], &mut env.rng);
                }
            }
        }
        for connection in 0..env.connections.len() {
            let at = &env.connections[connection];
            if !at.closed && (at.abandoned || at.black_hole) {
                env.close(connection);
            }
            while !env.connections[connection].closed && !env.connections[connection].statuses.is_empty() {
                env.hear(connection);
            }
        }
        env.broker.heal(env.now);
        env.look();
        for worker in &mut self.workers {
            if let Phase::Down = worker.phase {
                *worker = Worker::new(worker.name, worker.server);
            }
            worker.step(&mut self.env);
        }
        for _ in 0..4 {
            self.carry_out();
            self.write_witness();
        }
    }

    fn is_done(&self) -> bool {
        if self.env.known.foreign == Some(Foreign::Clone) {
            return self.env.known.refusals > 0;
        }
        if self.workers.iter().any(|worker| matches!(worker.phase, Phase::Refused)) {
            return true;
        }
        let server = &self.env.servers[0];
        let end = server.last_event_end();
        self.env.known.must_refuse[0].is_none()
            && self.missing().is_empty()
            && server.row.position >= end
            && server.slot.as_ref().is_some_and(|slot| slot.confirmed >= end)
    }

    fn missing(&self) -> Vec<u32> {
        let events = self.env.servers[0].committed.iter().flat_map(|t| t.events());
        events.map(|event| event.id).filter(|id| !self.env.known.visible.contains(id)).collect()
    }
}
