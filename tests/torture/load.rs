//! The steady load: orders change and say so in their outbox, in the same transaction.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use postgres::{Client, NoTls, Statement};

const TRANSACTIONS_PER_S: u32 = 300;
const WRITERS: u32 = 4;
pub const ORDERS: i64 = 50;

/// Whoever changes an order holds its row until the commit, so revisions count in commit order.
const EVENT: &str = "WITH changed AS (UPDATE sales_order SET revision = revision + 1 WHERE order_id = $1 RETURNING *)
    INSERT INTO outbox_event (order_id, revision, event_type, payload)
    SELECT order_id, revision, 'OrderPaid', jsonb_build_object('order', order_id, 'revision', revision) FROM changed";

pub struct Load {
    stop: Arc<AtomicBool>,
    writers: Vec<JoinHandle<()>>,
}

impl Load {
    pub fn start(url: &str, random: &mut fastrand::Rng) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let writer = |_| {
            let (stop, url, random) = (Arc::clone(&stop), url.to_owned(), random.fork());
            std::thread::spawn(move || write(&url, random, &stop))
        };
        let writers = (0..WRITERS).map(writer).collect();
        Load { stop, writers }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for writer in self.writers.drain(..) {
            let _ = writer.join();
        }
    }
}

fn write(url: &str, mut random: fastrand::Rng, stop: &AtomicBool) {
    const PERIOD: Duration = Duration::from_secs(1).checked_div(TRANSACTIONS_PER_S / WRITERS).unwrap();
    let (mut session, mut due) = (None, Instant::now());
    while !stop.load(Ordering::Relaxed) {
        if session.is_none() {
            session = Client::connect(url, NoTls).ok().and_then(|mut client| {
                let event = client.prepare(EVENT).ok()?;
                Some((client, event))
            });
        }
        let written = session.as_mut().map(|(client, event)| transaction(client, event, &mut random));
        if !matches!(written, Some(Ok(()))) {
            session = None; // the server may be restarting
        }
        // What could not be written is not made up for: the load is steady.
        due = (due + PERIOD).max(Instant::now());
        std::thread::sleep(due.saturating_duration_since(Instant::now())); // the rate of the load
    }
}

/// Nine of ten are one event.
fn transaction(
    client: &mut Client,
    event: &Statement,
    random: &mut fastrand::Rng,
) -> Result<(), postgres::Error> {
    let order = random.i64(1..=ORDERS);
    let shape = random.u8(0..40);
    if shape > 3 {
        return client.execute(event, &[&order]).map(drop);
    }
    let mut transaction = client.transaction()?;
    transaction.execute(event, &[&order])?;
    match shape {
        0 => {
            // Upwards, so that two writers never wait for each other.
            for order in order..=(order + random.i64(0..4)).min(ORDERS) {
                transaction.execute(event, &[&order])?;
                transaction.execute(event, &[&order])?;
            }
        }
        1 => return transaction.rollback(),
        _ => {
            let mut savepoint = transaction.transaction()?;
            savepoint.execute(event, &[&order])?;
            savepoint.rollback()?;
            transaction.execute(event, &[&order])?;
        }
    }
    transaction.commit()
}
