//! Attachments of the loaded programs.

use std::{
    fs, io,
    os::fd::{AsFd as _, BorrowedFd},
    path::Path,
};

use slipgate_abi::{IfIndex, portframe::is_port_device};

use super::Datapath;
use crate::{
    Error, Result,
    attach::{
        Attached, AttachedBy, Hook, Program, XdpMode, chain, chain::Standing, clsact, explain,
        link, pinned, program_id,
    },
    bpf,
    device::Device,
    netlink, pacing, paths,
};

impl Datapath {
    /// Attaches a TC program, or replaces another build of it. An attachment by the other hook is
    /// removed afterwards, so that no packet meets no program.
    ///
    /// # Errors
    /// The lock is not obtained, or the kernel refuses the attachment.
    pub fn attach(&self, program: Program, ifindex: IfIndex, hook: Hook) -> Result<()> {
        let _lock = self.lock()?;
        let by = match hook {
            Hook::Tcx => AttachedBy::Link,
            Hook::Clsact => AttachedBy::Clsact,
        };
        let attached = Attached {
            program,
            ifindex,
            by,
        };
        let fd = self.program(program)?;
        let pin = self.paths.pin(&attached.pin_name());
        match hook {
            Hook::Tcx => link::attach(&pin, fd, ifindex, || {
                let place = match program {
                    Program::GuestShut => bpf::ChainPosition::Last,
                    _ => bpf::ChainPosition::First,
                };
                bpf::link_create_tcx(fd, ifindex, place)
            }),
            Hook::Clsact => clsact::attach(&pin, fd, program, ifindex),
        }
        .map_err(|error| explain(error, program, ifindex))?;
        let other = Attached {
            by: match by {
                AttachedBy::Link => AttachedBy::Clsact,
                AttachedBy::Clsact => AttachedBy::Link,
            },
            ..attached
        };
        self.remove_attached(other)?;
        Ok(())
    }

    /// Attaches the programs of a TAP as clsact filters: [`Program::GuestEgress`], and
    /// [`Program::GuestShut`] behind it. Returns `false`, and attaches nothing, if tcx links must be
    /// used, which run before all filters: others have programs or filters at the TAP; or it has
    /// our link already, which stays without a gap.
    ///
    /// # Errors
    /// The lock is not obtained, or the kernel refuses a filter.
    pub(crate) fn attach_filters(&self, ifindex: IfIndex) -> Result<bool> {
        let of = |program, by| Attached {
            program,
            ifindex,
            by,
        };
        // In this order, the first filter of the chain changes once only: each change may wait for
        // the readers of the one before.
        let programs = [Program::GuestEgress, Program::GuestShut];
        let _lock = self.lock()?;
        let what = format!("list the tcx programs of the device with index {ifindex}");
        let by_tcx = by_tcx(ifindex).map_err(Error::os(what))?;
        let has_tcx = by_tcx.is_some();
        if by_tcx.is_some_and(|programs| !programs.is_empty()) {
            return Ok(false);
        }
        let mut requests = netlink::Requests::open()?;
        let failed = |error| explain(error, Program::GuestEgress, ifindex);
        let is_new = clsact::make_qdisc(&mut requests, ifindex).map_err(failed)?;
        if !is_new && has_tcx && clsact::has_others(&mut requests, ifindex)? {
            return Ok(false);
        }
        for program in programs {
            let fd = self.program(program)?;
            let pin = self.paths.pin(&of(program, AttachedBy::Clsact).pin_name());
            clsact::make_filter(&mut requests, &pin, fd, program, ifindex)
                .map_err(|error| explain(error, program, ifindex))?;
            // Of a former interface with this index.
            self.remove_attached(of(program, AttachedBy::Link))?;
        }
        Ok(true)
    }

    /// Detaches the programs of a TAP, which is down.
    ///
    /// # Errors
    /// The lock is not obtained, or a program cannot be detached.
    pub(crate) fn detach_from_tap(&self, ifindex: IfIndex) -> Result<()> {
        // In this order no other filter becomes the first of the chain.
        let programs = [Program::GuestShut, Program::GuestEgress];
        if !programs
            .iter()
            .any(|program| self.is_attached(*program, ifindex))
        {
            return Ok(());
        }
        let _lock = self.lock()?;
        for program in programs {
            for by in [AttachedBy::Link, AttachedBy::Clsact] {
                self.remove_attached(Attached {
                    program,
                    ifindex,
                    by,
                })?;
            }
        }
        Ok(())
    }

    /// Attaches the guard to an interface by XDP.
    ///
    /// # Errors
    /// The lock is not obtained, or the kernel or the driver refuses the attachment.
    pub fn attach_guard(&self, ifindex: IfIndex, mode: XdpMode) -> Result<()> {
        let attached = Attached {
            program: Program::Guard,
            ifindex,
            by: AttachedBy::Link,
        };
        let fd = self.program(Program::Guard)?;
        let pin = self.paths.pin(&attached.pin_name());
        // Called every few seconds: while nothing has changed, it takes no lock.
        if link::is_attached(&pin, fd, ifindex) {
            return Ok(());
        }
        let _lock = self.lock()?;
        let flags = match mode {
            XdpMode::Native => bpf::XDP_FLAGS_DRV_MODE,
            XdpMode::Generic => bpf::XDP_FLAGS_SKB_MODE,
        };
        link::attach(&pin, fd, ifindex, || {
            bpf::link_create_xdp(fd, ifindex, flags)
        })
        .map_err(|error| explain(error, Program::Guard, ifindex))
    }

    /// Detaches a program from an interface. Returns whether it was attached.
    ///
    /// # Errors
    /// The lock is not obtained, or the program cannot be detached.
    pub fn detach(&self, program: Program, ifindex: IfIndex) -> Result<bool> {
        let attachments = [AttachedBy::Link, AttachedBy::Clsact].map(|by| Attached {
            program,
            ifindex,
            by,
        });
        // No other process attaches to an interface that this one serves: a missing pin needs no
        // lock.
        if !self.is_attached(program, ifindex) {
            return Ok(false);
        }
        let _lock = self.lock()?;
        let mut found = false;
        for attached in attachments {
            found |= self.remove_attached(attached)?;
        }
        Ok(found)
    }

    /// Whether a program is pinned for an interface, by whichever hook.
    pub fn is_attached(&self, program: Program, ifindex: IfIndex) -> bool {
        [AttachedBy::Link, AttachedBy::Clsact].iter().any(|by| {
            let attached = Attached {
                program,
                ifindex,
                by: *by,
            };
            self.paths.pin(&attached.pin_name()).exists()
        })
    }

    /// Returns the place of a program at an interface: who is attached in front of it might withhold
    /// packets from it.
    ///
    /// # Errors
    /// The kernel does not list what is attached.
    pub fn standing(&self, program: Program, ifindex: IfIndex) -> Result<Standing> {
        let mut requests = netlink::Requests::open()?;
        let mut ours = vec![program_id(self.program(program)?)?];
        if let Some(twin) = self.twin(program) {
            ours.push(program_id(twin)?);
        }
        let mut look = |ours: &[u32]| {
            chain::standing(ours, ifindex, &mut requests)
                .map_err(|error| explain(error, program, ifindex))
        };
        let standing = look(&ours)?;
        if standing.is_first() {
            return Ok(standing);
        }
        // Another process's build may have taken this one's place: its programs are slipgate's too.
        let before = ours.len();
        ours.extend(self.pinned_programs(program, ifindex));
        match ours.len() == before {
            true => Ok(standing),
            false => look(&ours),
        }
    }

    /// Ids of the program and its twin of the build that is pinned, and of that which the pinned link
    /// at an interface has. What is not there, or may not be asked, is left out.
    fn pinned_programs(&self, program: Program, ifindex: IfIndex) -> Vec<u32> {
        let names = [Some(program.name()), program.twin_name()];
        let pinned = names
            .into_iter()
            .flatten()
            .filter_map(|name| bpf::obj_get(&self.paths.pin(name)).ok());
        let attached = Attached {
            program,
            ifindex,
            by: AttachedBy::Link,
        };
        let linked = link::program_at(&self.paths.pin(&attached.pin_name()), ifindex);
        pinned
            .filter_map(|pinned| program_id(pinned.as_fd()).ok())
            .chain(linked)
            .collect()
    }

    /// Makes a program the first at an interface that it is attached to; no packet meets no program
    /// meanwhile. One that somebody has detached is attached again. A filter becomes a link, where the
    /// kernel has links of tcx (from 6.6 on).
    ///
    /// # Errors
    /// The lock is not obtained, or the kernel refuses: there are too many programs at the interface, or
    /// filters of another kind in the first place.
    pub fn move_to_front(&self, program: Program, ifindex: IfIndex) -> Result<()> {
        match has_tcx(ifindex) {
            true => self.move_link_to_front(program, ifindex),
            false => self.move_filter_to_front(program, ifindex),
        }
    }

    /// Makes a filter the first of all filters; no packet meets no program meanwhile. Where there is
    /// none it is made.
    pub(crate) fn move_filter_to_front(&self, program: Program, ifindex: IfIndex) -> Result<()> {
        let attached = Attached {
            program,
            ifindex,
            by: AttachedBy::Clsact,
        };
        let pin = self.paths.pin(&attached.pin_name());
        if !pin.exists() {
            return self.attach(program, ifindex, Hook::Clsact);
        }
        let _lock = self.lock()?;
        if !pin.exists() {
            // It was detached meanwhile.
            return Ok(());
        }
        let failed = |error| explain(error, program, ifindex);
        // The pinned one may be of a later build, which is in force everywhere else.
        let pinned = bpf::obj_get(&self.paths.pin(program.name()));
        let fd = match &pinned {
            Ok(program) => program.as_fd(),
            Err(_) => self.program(program)?,
        };
        let mut requests = netlink::Requests::open()?;
        clsact::make_qdisc(&mut requests, ifindex).map_err(failed)?;
        clsact::move_to_front(&mut requests, fd, program, ifindex).map_err(failed)
    }

    fn move_link_to_front(&self, program: Program, ifindex: IfIndex) -> Result<()> {
        let attached = Attached {
            program,
            ifindex,
            by: AttachedBy::Link,
        };
        let pin = self.paths.pin(&attached.pin_name());
        let is_linked = pin.exists() && link::target(&pin)? == ifindex;
        let (Some(twin), true) = (self.twin(program), is_linked) else {
            return self.attach(program, ifindex, Hook::Tcx);
        };
        let _lock = self.lock()?;
        // The pinned ones may be of a later build, which is in force everywhere else.
        let name = program.twin_name().unwrap_or_default();
        let pins = [program.name(), name].map(|name| bpf::obj_get(&self.paths.pin(name)));
        let pair = match &pins {
            [Ok(program), Ok(twin)] => [program.as_fd(), twin.as_fd()],
            _ => [self.program(program)?, twin],
        };
        chain::move_to_front(&pin, pair, ifindex).map_err(|error| explain(error, program, ifindex))
    }

    /// Returns the pinned attachments, defunct ones included.
    ///
    /// # Errors
    /// The pin directory cannot be read.
    pub fn attached(&self) -> Result<Vec<Attached>> {
        pinned(&self.paths)
    }

    /// Removes the pins of attachments whose interface is gone. Returns how many.
    ///
    /// # Errors
    /// The lock is not obtained, or a pin cannot be read or removed.
    pub fn remove_defunct(&self) -> Result<usize> {
        // Most changes of links leave none: these need no lock.
        if !self.has_defunct()? {
            return Ok(0);
        }
        let _lock = self.lock()?;
        let mut removed = 0;
        for attached in self.attached()? {
            if !self.is_alive(attached)? {
                self.remove_attached(attached)?;
                removed += 1;
            }
        }
        Ok(removed)
    }

    /// Removes the pins of one interface if it is gone. Returns how many.
    ///
    /// # Errors
    /// The lock is not obtained, or a pin cannot be read or removed.
    pub fn remove_defunct_at(&self, ifindex: IfIndex) -> Result<usize> {
        let mut lock = None;
        let mut removed = 0;
        for program in Program::ALL {
            for by in [AttachedBy::Link, AttachedBy::Clsact] {
                let attached = Attached {
                    program,
                    ifindex,
                    by,
                };
                if !self.paths.pin(&attached.pin_name()).exists() {
                    continue;
                }
                if lock.is_none() {
                    lock = Some(self.lock()?);
                }
                // Another process may have removed it meanwhile.
                if !self.is_alive(attached).unwrap_or(true) {
                    removed += usize::from(self.remove_attached(attached)?);
                }
            }
        }
        Ok(removed)
    }

    fn has_defunct(&self) -> Result<bool> {
        for attached in self.attached()? {
            // One that another process removes just now is examined under the lock.
            if !self.is_alive(attached).unwrap_or(false) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn is_alive(&self, attached: Attached) -> Result<bool> {
        Ok(match attached.by {
            AttachedBy::Link => {
                link::target(&self.paths.pin(&attached.pin_name()))? == attached.ifindex
            }
            AttachedBy::Clsact => Device::with_index(attached.ifindex).is_ok(),
        })
    }

    /// Replaces the programs of every attachment that has another build's. The caller holds the
    /// lock.
    pub(crate) fn replace_attached(&self) -> Result<()> {
        for attached in self.attached()? {
            let fd = self.program(attached.program)?;
            let pin = self.paths.pin(&attached.pin_name());
            match attached.by {
                AttachedBy::Link => {
                    // A process that died while it moved the program may have left a twin in front.
                    link::remove(&link::successor_pin(&pin))?;
                    link::replace(&pin, fd, attached.ifindex)?;
                }
                AttachedBy::Clsact if Device::with_index(attached.ifindex).is_err() => {}
                AttachedBy::Clsact => self.replace_filter(attached, &pin, fd)?,
            }
        }
        Ok(())
    }

    fn replace_filter(&self, attached: Attached, pin: &Path, fd: BorrowedFd<'_>) -> Result<()> {
        let Attached {
            program, ifindex, ..
        } = attached;
        if !clsact::is_noted(pin, fd)? {
            clsact::attach(pin, fd, program, ifindex)?;
        }
        match program.twin_name().is_some() && !has_tcx(ifindex) {
            true => clsact::attach_alone(&mut netlink::Requests::open()?, fd, program, ifindex),
            false => Ok(()),
        }
    }

    /// Removes all attachments. TAPs are brought down first, and engine ports and pacing devices removed. The caller
    /// holds the lock and knows that no owner lives.
    pub(crate) fn detach_all(&self) -> Result<()> {
        for attached in self.attached()? {
            match (attached.program, Device::with_index(attached.ifindex)) {
                (Program::GuestEgress | Program::GuestShut, Ok(tap)) => {
                    tap.set_up(false)?;
                    pacing::unshape_tap(attached.ifindex)?;
                }
                // A reused index may be another device.
                (Program::EnginePort, Ok(port)) if is_port_device(port.name()) => {
                    netlink::remove_link(attached.ifindex, port.name())?;
                }
                (Program::Pacer, Ok(far)) if pacing::is_far_end(&far) => {
                    netlink::remove_link(attached.ifindex, far.name())?;
                }
                _ => {}
            }
            self.remove_attached(attached)?;
        }
        Ok(())
    }

    fn remove_attached(&self, attached: Attached) -> Result<bool> {
        let pin = self.paths.pin(&attached.pin_name());
        if !pin.exists() {
            return Ok(false);
        }
        match attached.by {
            AttachedBy::Link => {
                link::remove(&link::successor_pin(&pin))?;
                link::remove(&pin)
            }
            AttachedBy::Clsact => {
                clsact::detach(attached.program, attached.ifindex)?;
                paths::remove_if_there(&pin, |p| fs::remove_file(p))
            }
        }
    }
}

/// Programs at an interface that are attached by tcx; `None`: the kernel has none. Before Linux 6.6 it
/// does not know the question (EINVAL); it may also lack memory for the answer.
fn by_tcx(ifindex: IfIndex) -> io::Result<Option<Vec<u32>>> {
    match bpf::tcx_programs(ifindex) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(None),
        asked => asked.map(Some),
    }
}

/// Whether programs can be attached by tcx.
fn has_tcx(ifindex: IfIndex) -> bool {
    !matches!(by_tcx(ifindex), Ok(None))
}
