//! Attachments as filters of the clsact qdisc: for kernels before 6.6, for programs that must run
//! after all tcx links, and for the TAPs of a daemon, which come and go by the thousand: a tcx link
//! is made and removed with a wait for an RCU grace period, a filter without.
//!
//! Of filters with the same priority the kernel asks the one first that was added last (`cls_bpf_change`
//! of `net/sched/cls_bpf.c`; one that is replaced keeps its place). So somebody's filter may come in
//! front of slipgate's, and slipgate's goes in front again by being removed and added, while a
//! stand-in with the same program is there.

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
/// Handle of the filter that stands in for slipgate's first one while it moves ([`move_to_front`]).
const STAND_IN: TcHandle = TcHandle {
    major: 0,
    minor: 0x5348,
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
    make_qdisc(&mut requests, ifindex)?;
    make_filter(&mut requests, pin, fd, program, ifindex)
}

/// Makes the interface's clsact qdisc. Returns `false` if it has one already.
pub(crate) fn make_qdisc(requests: &mut Requests, ifindex: IfIndex) -> Result<bool> {
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
        Err(error) if error.errno() == Some(libc::EEXIST) => Ok(false),
        made => made.map(|()| true),
    }
}

/// Whether others have filters at the interface's ingress.
pub(crate) fn has_others(requests: &mut Requests, ifindex: IfIndex) -> Result<bool> {
    let mut question = TcMessage::with_index(ifindex.get() as i32);
    question.header.parent = INGRESS;
    let mut has_others = false;
    requests.dump(
        RouteNetlinkMessage::GetTrafficFilter(question),
        "list the clsact filters",
        |answer| {
            if let RouteNetlinkMessage::NewTrafficFilter(filter) = answer {
                // A message without a handle stands for a priority.
                let handle = filter.header.handle;
                has_others |= handle != TcHandle::UNSPEC && !is_own(handle);
            }
        },
    )?;
    Ok(has_others)
}

/// Returns kind and priority of the filters that run before slipgate's first one; `None` if the
/// interface does not have that.
pub(crate) fn before_ours(
    requests: &mut Requests,
    ifindex: IfIndex,
) -> Result<Option<Vec<(String, u16)>>> {
    let mut question = TcMessage::with_index(ifindex.get() as i32);
    question.header.parent = INGRESS;
    let (mut before, mut is_there) = (Vec::new(), false);
    let listed = requests.dump(
        RouteNetlinkMessage::GetTrafficFilter(question),
        "list the clsact filters",
        |answer| {
            let RouteNetlinkMessage::NewTrafficFilter(filter) = answer else {
                return;
            };
            let handle = filter.header.handle;
            // In other chains only what a filter of the first one sends there.
            let is_elsewhere = |of: &TcAttribute| matches!(of, TcAttribute::Chain(n) if *n != 0);
            if is_there || handle == TcHandle::UNSPEC || filter.attributes.iter().any(is_elsewhere)
            {
                return;
            }
            let priority = (filter.header.info >> 16) as u16;
            if is_own(handle) && u32::from(priority) == FIRST {
                is_there = true;
                return;
            }
            let kind = filter.attributes.iter().find_map(|of| match of {
                TcAttribute::Kind(kind) => Some(kind.clone()),
                _ => None,
            });
            before.push((kind.unwrap_or_default(), priority));
        },
    );
    match listed {
        // There is no such qdisc any more.
        Err(error) if matches!(error.errno(), Some(libc::ENOENT | libc::EINVAL)) => Ok(None),
        other => other.map(|()| is_there.then_some(before)),
    }
}

/// Whether a message is about a filter of slipgate's.
pub(crate) fn is_ours(message: &TcMessage) -> bool {
    is_own(message.header.handle)
}

fn is_own(handle: TcHandle) -> bool {
    [HANDLE, STAND_IN].contains(&handle)
}

/// Whether a message is about a qdisc whose filters see what arrives.
pub(crate) fn is_qdisc(message: &TcMessage) -> bool {
    message.header.parent == CLSACT
}

/// Makes or replaces the filter on the interface's clsact qdisc, then pins its program as a record.
pub(crate) fn make_filter(
    requests: &mut Requests,
    pin: &Path,
    fd: BorrowedFd<'_>,
    program: Program,
    ifindex: IfIndex,
) -> Result<()> {
    put(requests, HANDLE, fd, program, ifindex)?;
    if is_noted(pin, fd)? {
        return Ok(());
    }
    paths::remove_if_there(pin, |p| fs::remove_file(p))?;
    bpf::obj_pin(fd, pin).map_err(Error::os(format!("note it as {}", pin.display())))
}

/// Whether the filter that is noted by the pin has this program.
pub(crate) fn is_noted(pin: &Path, fd: BorrowedFd<'_>) -> Result<bool> {
    match bpf::obj_get(pin) {
        Ok(noted) => Ok(program_id(noted.as_fd())? == program_id(fd)?),
        Err(_) => Ok(false),
    }
}

/// Puts the filter in front of others with its priority. At every moment it or its stand-in is there, also if
/// a process died in an earlier move: then there are a filter and a stand-in, or one of the two.
pub(crate) fn move_to_front(
    requests: &mut Requests,
    fd: BorrowedFd<'_>,
    program: Program,
    ifindex: IfIndex,
) -> Result<()> {
    attach_alone(requests, fd, program, ifindex)?;
    put(requests, STAND_IN, fd, program, ifindex)?;
    remove(requests, HANDLE, program, ifindex)?;
    put(requests, HANDLE, fd, program, ifindex)?;
    remove(requests, STAND_IN, program, ifindex)
}

/// Makes or replaces the filter, and removes a stand-in that a process left which died in a move: it may be
/// the only one, or in front with another build's program.
pub(crate) fn attach_alone(
    requests: &mut Requests,
    fd: BorrowedFd<'_>,
    program: Program,
    ifindex: IfIndex,
) -> Result<()> {
    put(requests, HANDLE, fd, program, ifindex)?;
    remove(requests, STAND_IN, program, ifindex)
}

/// Removes the filter. A missing filter, qdisc or interface is no error. The qdisc stays, even if it
/// has no other filter: the kernel can't be told to remove it only then, and between a look and the
/// removal somebody else may add a filter, which would be removed too.
pub(crate) fn detach(program: Program, ifindex: IfIndex) -> Result<()> {
    let mut requests = Requests::open()?;
    remove(&mut requests, HANDLE, program, ifindex)?;
    match program.twin_name() {
        // A process died while it moved the filter.
        Some(_) => remove(&mut requests, STAND_IN, program, ifindex),
        None => Ok(()),
    }
}

/// Makes or replaces a filter. A new one is the first with its priority.
fn put(
    requests: &mut Requests,
    handle: TcHandle,
    fd: BorrowedFd<'_>,
    program: Program,
    ifindex: IfIndex,
) -> Result<()> {
    let mut filter = message(ifindex, handle, INGRESS, TcFilterBpf::KIND);
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
    )
}

/// Removes a filter. A missing filter, qdisc or interface is no error.
fn remove(
    requests: &mut Requests,
    handle: TcHandle,
    program: Program,
    ifindex: IfIndex,
) -> Result<()> {
    let mut filter = message(ifindex, handle, INGRESS, TcFilterBpf::KIND);
    filter.header.info = filter_info(program);
    let sent = requests.send(
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
