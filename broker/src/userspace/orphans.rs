//! The flows of a user-mode engine that has died.
//!
//! # Theory of operation
//! The engine counts in its flows' slots, in files of memory that this process has too. So what a flow had
//! counted last is there after the engine's end, however that came. This process does not read it itself:
//! whoever took the engine over may have written anything there. Another engine is started, confined as
//! the first, without a guest and without sockets to the world. It finds the slots as the successor of an
//! engine does in hybrid mode, writes a `flow_end` of each that the flow log has no end of, moves its
//! counts to those of the VM, and ends. The reason is `engine-died`, or `adopted` of a flow that had begun
//! to end. `flows` shows none of them any more.
//!
//! Relayed connections (forwards, the host's loopback, DNS over TCP) have no slot: they are not recorded.
use std::{
    os::{fd::AsFd as _, unix::net::UnixStream},
    time::Duration,
};

use anyhow::Context as _;
use slipgate_ipc::engine::{FromEngine, UserspaceStart};

use super::{Beginning, Served};
use crate::{output_files::open_flow_log, process::ChildProcess, say::counted};

/// Time limit for each message of the process that records: nobody is served meanwhile.
const RECORDS_WITHIN: Duration = Duration::from_secs(10);

impl Served {
    /// Records the flows that an engine which has ended had, and waits for that. Returns how many of
    /// them had not begun to end, as part of a sentence.
    pub(super) fn record_orphans(&self) -> String {
        match self.recorded_orphans() {
            Ok(flows) => format!("{} ended with it", counted(flows, "flow")),
            Err(e) => format!("its flows are not recorded: {e:#}"),
        }
    }

    fn recorded_orphans(&self) -> anyhow::Result<u64> {
        // By its name: it may be another file than at the start.
        let flow_log = self.nat.flow_log.as_deref().map(open_flow_log);
        let flow_log = flow_log.transpose()?;
        let (link, _other_end) = UnixStream::pair().context("making a pair of sockets")?;
        let start = Beginning {
            nat: &self.nat,
            users: &self.users,
            files: [flow_log.as_ref(), None],
            forwards: &self.forwards,
            view: &self.view,
            link: link.as_fd(),
            namespace: None,
            how: UserspaceStart::RecordOrphans,
            vm: self.vm.spec.clone(),
            log: &self.log,
        };
        recorded_by(start.engine(&self.place)?)
    }
}

fn recorded_by(mut process: ChildProcess) -> anyhow::Result<u64> {
    loop {
        match process.next(RECORDS_WITHIN)? {
            Some(FromEngine::Ready { adopted }) => return Ok(adopted),
            Some(_) => {}
            None => return Err(process.ended_before("it had recorded them")),
        }
    }
}
