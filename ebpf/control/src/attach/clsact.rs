//! Attachments as filters of the clsact qdisc: for kernels before 6.6, and for programs that must
//! run after all tcx links.

use std::{
    fs,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    path::Path,
};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::{
    RouteNetlinkMessage,
    tc::{TcAttribute, TcBpfFlags, TcFilterBpf, TcFilterBpfOption, TcHandle, TcMessage, TcOption},
};
use slipgate_abi::IfIndex;

use super::Program;
use crate::{Error, Result, attach::program_id, bpf, netlink::Requests, paths};

/// Priority of the first filter.
const FIRST: u32 = 1;
/// Priority of the last filter.
const LAST: u32 = 0xffff;
/// Handle of slipgate's filters: "SG" in ASCII.
const HANDLE: TcHandle = TcHandle {
    major: 0,
    minor: 0x5347,
};
/// Parent of the qdisc: `TC_H_CLSACT`.
const CLSACT: TcHandle = TcHandle {
    major: 0xffff,
    minor: 0xfff1,
};
/// Parent of ingress filters: `TC_H_CLSACT` with `TC_H_MIN_INGRESS`.
const INGRESS: TcHandle = TcHandle {
    major: 0xffff,
    minor: 0xfff2,
};
const ETH_P_ALL: u16 = libc::ETH_P_ALL as u16;

/// Makes or replaces the filter, then pins its program as a record.
pub(crate) fn attach(
    pin: &Path,
    fd: BorrowedFd<'_>,
    program: Program,
    ifindex: IfIndex,
) -> Result<()> {
    let mut requests = Requests::open()?;
    let qdisc = message(
        ifindex,
        TcHandle {
            major: 0xffff,
            minor: 0,
        },
        CLSACT,
        "clsact",
    );
    match requests.send(
        RouteNetlinkMessage::NewQueueDiscipline(qdisc),
        NLM_F_CREATE | NLM_F_EXCL,
        "make the clsact qdisc",
    ) {
        Err(error) if error.errno() == Some(libc::EEXIST) => {}
        other => other?,
    }
    let mut filter = message(ifindex, HANDLE, INGRESS, TcFilterBpf::KIND);
    filter.header.info = filter_info(program);
    filter.attributes.push(TcAttribute::Options(vec![
        TcOption::Bpf(TcFilterBpfOption::ProgFd(fd.as_raw_fd() as u32)),
        TcOption::Bpf(TcFilterBpfOption::ProgName(program.name().into())),
        TcOption::Bpf(TcFilterBpfOption::Flags(TcBpfFlags::DirectAction)),
    ]));
    requests.send(
        RouteNetlinkMessage::NewTrafficFilter(filter),
        NLM_F_CREATE | NLM_F_REPLACE,
        &format!(
            "make the clsact filter with priority {} (is there another kind of filter?)",
            priority(program)
        ),
    )?;
    if let Ok(noted) = bpf::obj_get(pin) {
        if program_id(noted.as_fd())? == program_id(fd)? {
            return Ok(());
        }
        paths::remove_if_there(pin, |p| fs::remove_file(p))?;
    }
    bpf::obj_pin(fd, pin).map_err(Error::os(format!("note it as {}", pin.display())))
}

/// Removes the filter. A missing filter, qdisc or interface is no error. The qdisc stays: it may
/// carry other filters.
pub(crate) fn detach(program: Program, ifindex: IfIndex) -> Result<()> {
    let mut filter = message(ifindex, HANDLE, INGRESS, TcFilterBpf::KIND);
    filter.header.info = filter_info(program);
    let sent = Requests::open()?.send(
        RouteNetlinkMessage::DelTrafficFilter(filter),
        0,
        "remove the clsact filter",
    );
    match sent {
        Err(error)
            if matches!(
                error.errno(),
                Some(libc::ENOENT | libc::ENODEV | libc::EINVAL)
            ) =>
        {
            Ok(())
        }
        other => other,
    }
}

fn message(ifindex: IfIndex, handle: TcHandle, parent: TcHandle, kind: &str) -> TcMessage {
    let mut message = TcMessage::with_index(ifindex.get() as i32);
    message.header.handle = handle;
    message.header.parent = parent;
    message.attributes.push(TcAttribute::Kind(kind.into()));
    message
}

const fn priority(program: Program) -> u32 {
    match program {
        Program::GuestShut => LAST,
        _ => FIRST,
    }
}

/// Packs priority and protocol as `tcm_info` has them.
const fn filter_info(program: Program) -> u32 {
    (priority(program) << 16) | ETH_P_ALL.to_be() as u32
}
