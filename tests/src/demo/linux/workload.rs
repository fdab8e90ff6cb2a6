//! Workload of the guest, step by step.

use std::{
    net::{Ipv4Addr, SocketAddr, SocketAddrV4},
    time::Duration,
};

use slipgate_testbed::{
    Error, GUEST_DEVICE, Result,
    census::{Census, Sent},
    clients::{
        dns::{self, Resolved},
        http, icmp,
        tcp::{self, ConnectOutcome, Transfer},
        udp,
    },
    dhcp::{self, Lease},
    kernel_view,
    slipgate::FlowRow,
    world::SERVER,
};

use super::stage::{NAME, Stage, VM};
use crate::progress::{Progress, bytes, grouped};

const WAIT: Duration = Duration::from_secs(5);
const CONNECTIONS: usize = 1_000;
const BULK_BYTES: u64 = 256 << 20;
pub(crate) const DOWN_SEED: u64 = 1;
pub(crate) const UP_SEED: u64 = 2;
/// A resolver that the guest might have wired in; every port 53 is slipgate's.
const FOREIGN_RESOLVER: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 53), 53);

/// Observations of the workload.
pub(crate) struct Seen {
    pub(crate) lease: Lease,
    pub(crate) first_answer: Resolved,
    pub(crate) second_answer: Resolved,
    pub(crate) foreign_answer: Resolved,
    pub(crate) questions_upstream: u64,
    pub(crate) page: (u16, Vec<u8>),
    pub(crate) pings: usize,
    pub(crate) datagrams: udp::PacedReport,
    /// Connect, wait for the server's end, close; sorted.
    pub(crate) connects: Vec<Duration>,
    pub(crate) bulk: Bulk,
    pub(crate) refused: ConnectOutcome,
    pub(crate) why_denied: (bool, String),
    pub(crate) why_allowed: (bool, String),
}

/// Bulk transfers, and the frames that went to the engine meanwhile.
pub(crate) struct Bulk {
    pub(crate) up: Transfer,
    pub(crate) down: Transfer,
    /// Frames that the guest sent, by kind.
    pub(crate) sent: Sent,
    /// Frames that the programs handed to the engine meanwhile.
    pub(crate) handed_over: u64,
    /// All flows at the end of the transfer.
    pub(crate) flows: Vec<FlowRow>,
    /// The download's slot, as bpftool prints it.
    pub(crate) slot: String,
}

pub(crate) fn run(stage: &Stage, progress: &mut Progress) -> Result<Seen> {
    let Stage { guest, servers, .. } = stage;
    let lease = guest.dhcp(WAIT)?;
    progress.step(
        "DHCP",
        &format!(
            "{}/{} in {:.1} ms",
            lease.address,
            lease.prefix,
            ms(lease.took)
        ),
    );

    let resolver = lease.dns.first().copied();
    let none = || Error::unexpected("the lease names no resolver");
    let resolver = SocketAddrV4::new(resolver.ok_or_else(none)?, 53);
    let ask = |server| guest.run(|| dns::query_udp(server, NAME, WAIT));
    let (first_answer, second_answer) = (ask(resolver)?, ask(resolver)?);
    let foreign_answer = ask(FOREIGN_RESOLVER)?;
    let questions_upstream = servers.names.udp_queries(NAME);
    progress.step("DNS", &format!("{NAME} is {:?}", first_answer.addresses()));

    let page = guest.run(|| http::get(servers.web.address(), "/", WAIT))?;
    let ping = guest.run(|| icmp::ping(SERVER, 3, 56, WAIT))?;
    let pings = ping.replies.len();
    let pace = Duration::from_micros(200);
    let datagrams = guest.run(|| udp::paced(servers.echo.address(), 500, 1000, pace, WAIT))?;
    let received = datagrams.received;
    progress.step(
        "HTTP, ping",
        &format!(
            "status {}, {pings} of 3 echoes, {received} of 500 datagrams echoed",
            page.0
        ),
    );

    let mut connects = Vec::with_capacity(CONNECTIONS);
    guest.run(|| {
        for _ in 0..CONNECTIONS {
            connects.push(tcp::connect_close(servers.close.address(), WAIT)?);
        }
        Ok::<_, Error>(())
    })?;
    connects.sort();
    progress.step(
        "connections",
        &format!("{} opened and closed", grouped(connects.len() as u64)),
    );

    let bulk = bulk(stage, progress, &lease)?;

    let denied = servers.denied_address();
    let refused = guest.run(|| tcp::connect_outcome(denied, WAIT))?;
    progress.step("denied", &format!("{denied}: {}", outcome(&refused)));
    let why = |to: SocketAddr| stage.slipgate.why(VM, &to.to_string(), "tcp");
    let (why_denied, why_allowed) = (why(denied.into())?, why(servers.web.address())?);
    Ok(Seen {
        lease,
        first_answer,
        second_answer,
        foreign_answer,
        questions_upstream,
        page,
        pings,
        datagrams,
        connects,
        bulk,
        refused,
        why_denied,
        why_allowed,
    })
}

/// Runs both directions one after the other, with a DNS question and a lease renewal during each.
fn bulk(stage: &Stage, progress: &mut Progress, lease: &Lease) -> Result<Bulk> {
    let Stage {
        guest,
        servers,
        world,
        ..
    } = stage;
    let server = servers.streams.address();
    let frames = || kernel_view::handed_over(&world.host, stage.slipgate.pins());
    let census = Census::start(guest)?;
    let before = frames()?;
    let down = guest.run(|| tcp::download(server, BULK_BYTES, DOWN_SEED, WAIT))?;
    progress.step("download", &rate(&down));
    let (up, flows, slot) = watched_upload(stage)?;
    progress.step("upload", &rate(&up));
    let mac = guest.config().mac;
    dhcp::renew(&guest.ns, GUEST_DEVICE, mac, lease, WAIT)?;
    guest.run(|| dns::query_udp(FOREIGN_RESOLVER, NAME, WAIT))?;
    // The last ACKs are on their way still.
    std::thread::sleep(Duration::from_millis(50));
    let handed_over = frames()? - before;
    let sent = census.finish(guest)?;
    Ok(Bulk {
        up,
        down,
        sent,
        handed_over,
        flows,
        slot,
    })
}

/// The upload, and in the midst of it the flow table and its own slot.
fn watched_upload(stage: &Stage) -> Result<(Transfer, Vec<FlowRow>, String)> {
    let server = stage.servers.streams.address();
    std::thread::scope(|scope| {
        let upload = scope.spawn(|| {
            stage
                .guest
                .run(|| tcp::upload(server, BULK_BYTES, UP_SEED, WAIT))
        });
        let live = loop {
            let flows = stage.slipgate.flows()?;
            let under_way = |flow: &&FlowRow| {
                flow.tx_bytes > BULK_BYTES / 8 && flow.remote == server.to_string()
            };
            if let Some(flow) = flows.iter().find(under_way) {
                let unread = |_| Error::unexpected(format!("`slipgate flows` shows {flow:?}"));
                let source = flow.guest.parse().map_err(unread)?;
                break (flows, source);
            }
            if upload.is_finished() {
                return Err(Error::unexpected(
                    "`slipgate flows` never showed the upload",
                ));
            }
        };
        let (flows, source) = live;
        let (host, pins) = (&stage.world.host, stage.slipgate.pins());
        let slot = kernel_view::slot_by_name(host, pins, source, server)?;
        let up = upload
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok((up, flows, slot))
    })
}

fn outcome(outcome: &ConnectOutcome) -> String {
    match outcome {
        ConnectOutcome::Refused(took) => format!("refused by RST in {:.2} ms", ms(*took)),
        ConnectOutcome::Connected(took) => format!("connected in {:.2} ms", ms(*took)),
        ConnectOutcome::Unreachable(_, took) => format!("unreachable in {:.2} ms", ms(*took)),
        ConnectOutcome::TimedOut(took) => format!("no answer in {:.2} ms", ms(*took)),
    }
}

fn rate(transfer: &Transfer) -> String {
    format!(
        "{} in {:.2} s, {:.2} Gb/s, each byte checked",
        bytes(transfer.receipt.bytes),
        transfer.took.as_secs_f64(),
        transfer.bits_per_second() / 1e9
    )
}

pub(crate) fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
