//! Notices of others' tc filters. The kernel tells of filters and their qdiscs, and not of tcx
//! programs, for which one has to look now and then.

use std::{
    collections::BTreeSet,
    os::fd::{AsFd, BorrowedFd},
};

use netlink_packet_route::{RouteNetlinkMessage, tc::TcMessage};
use slipgate_abi::IfIndex;

use super::clsact;
use crate::{
    Result,
    netlink::{Notice, Notices},
};

/// Multicast group `RTNLGRP_TC` of `linux/rtnetlink.h`.
const TC: u32 = 4;

/// Watch of filters that others make or remove. Poll its descriptor, then call
/// [`FilterWatch::take`].
#[derive(Debug)]
pub struct FilterWatch {
    notices: Notices,
}

impl FilterWatch {
    /// Opens a watch of the calling thread's network namespace.
    ///
    /// # Errors
    /// A netlink socket cannot be opened.
    pub fn open() -> Result<Self> {
        Ok(Self {
            notices: Notices::join(&[TC])?,
        })
    }

    /// Reads the notices without blocking. Returns the interfaces at which somebody else's filters
    /// or a qdisc at ingress changed. Notices that were lost are not made up for: who looks now and
    /// then sees what they were about.
    ///
    /// # Errors
    /// The notices cannot be read.
    pub fn take(&self) -> Result<BTreeSet<IfIndex>> {
        let mut changed = BTreeSet::new();
        self.notices.drain(|notice| {
            use RouteNetlinkMessage::{DelQueueDiscipline, DelTrafficFilter, NewTrafficFilter};
            let about: Option<TcMessage> = match notice {
                // Ours are removed with the qdisc, for which there may be no other notice.
                Notice::Message(DelQueueDiscipline(message)) if clsact::is_qdisc(&message) => {
                    Some(message)
                }
                Notice::Message(NewTrafficFilter(message) | DelTrafficFilter(message))
                    if !clsact::is_ours(&message) =>
                {
                    Some(message)
                }
                _ => None,
            };
            changed.extend(about.map(|message| IfIndex::new(message.header.index as u32)));
        })?;
        Ok(changed)
    }
}

impl AsFd for FilterWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.notices.as_fd()
    }
}

#[cfg(test)]
#[path = "watch_test.rs"]
mod tests;
