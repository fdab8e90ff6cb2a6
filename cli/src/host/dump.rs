//! Two netlink dumps that need no library: nftables chains and IPsec policies.
//!
//! Messages are `struct nlmsghdr` (16 bytes) and a payload (netlink(7)); attributes are length and
//! type (4 bytes) and a value, padded to 4.
use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

const HEADER: usize = 16;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;

/// `NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETCHAIN` and its answer `NFT_MSG_NEWCHAIN`.
const NFT_GETCHAIN: u16 = 10 << 8 | 4;
const NFT_NEWCHAIN: u16 = 10 << 8 | 3;
/// Length of `struct nfgenmsg`: family, version, resource id.
const NFGENMSG: usize = 4;
/// `enum nft_chain_attributes`, `enum nft_hook_attributes`.
const NFTA_CHAIN_TABLE: u16 = 1;
const NFTA_CHAIN_NAME: u16 = 3;
const NFTA_CHAIN_HOOK: u16 = 4;
const NFTA_CHAIN_POLICY: u16 = 5;
const NFTA_CHAIN_USE: u16 = 6;
const NFTA_HOOK_HOOKNUM: u16 = 1;
const NF_INET_FORWARD: u32 = 2;
const NF_DROP: u32 = 0;
const NFPROTO_INET: u8 = 1;
const NFPROTO_IPV4: u8 = 2;

const XFRM_MSG_NEWPOLICY: u16 = 0x13;
const XFRM_MSG_GETPOLICY: u16 = 0x15;
/// Length of `struct xfrm_userpolicy_id`.
const XFRM_POLICY_ID: usize = 64;

/// Chains that a forwarded packet would pass, as `family table chain`.
pub(super) fn forward_chains() -> io::Result<Vec<String>> {
    let mut chains = Vec::new();
    dump(
        libc::NETLINK_NETFILTER,
        NFT_GETCHAIN,
        &[0; NFGENMSG],
        |kind, payload| {
            if kind == NFT_NEWCHAIN {
                chains.extend(forward_chain(payload));
            }
        },
    )?;
    Ok(chains)
}

/// How many IPsec policies there are.
pub(super) fn xfrm_policies() -> io::Result<usize> {
    let mut policies = 0;
    dump(
        libc::NETLINK_XFRM,
        XFRM_MSG_GETPOLICY,
        &[0; XFRM_POLICY_ID],
        |kind, _| {
            policies += usize::from(kind == XFRM_MSG_NEWPOLICY);
        },
    )?;
    Ok(policies)
}

fn forward_chain(payload: &[u8]) -> Option<String> {
    let (&family, attributes) = (payload.first()?, payload.get(NFGENMSG..)?);
    let family = match family {
        NFPROTO_INET => "inet",
        NFPROTO_IPV4 => "ip",
        _ => return None,
    };
    let get = |wanted| attribute(attributes, wanted);
    let number = |value: &[u8]| Some(u32::from_be_bytes(*value.first_chunk()?));
    let hook = attribute(get(NFTA_CHAIN_HOOK)?, NFTA_HOOK_HOOKNUM).and_then(number)?;
    let used = get(NFTA_CHAIN_USE).and_then(number).unwrap_or(0);
    let policy = get(NFTA_CHAIN_POLICY).and_then(number);
    if hook != NF_INET_FORWARD || (used == 0 && policy != Some(NF_DROP)) {
        return None;
    }
    let text = |value: &[u8]| {
        String::from_utf8_lossy(value)
            .trim_end_matches('\0')
            .to_owned()
    };
    let table = get(NFTA_CHAIN_TABLE).map(text)?;
    let name = get(NFTA_CHAIN_NAME).map(text)?;
    Some(format!("{family} {table} {name}"))
}

/// The value of an attribute. The two top bits of a type are flags.
fn attribute(mut bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let length = usize::from(u16::from_ne_bytes(*bytes.first_chunk()?));
        let kind = u16::from_ne_bytes([*bytes.get(2)?, *bytes.get(3)?]) & 0x3fff;
        let value = bytes.get(4..length)?;
        if kind == wanted {
            return Some(value);
        }
        bytes = bytes.get(length.next_multiple_of(4)..)?;
    }
}

fn dump(
    protocol: libc::c_int,
    kind: u16,
    payload: &[u8],
    mut visit: impl FnMut(u16, &[u8]),
) -> io::Result<()> {
    let flags = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // SAFETY: numbers only.
    let fd = unsafe { libc::socket(libc::AF_NETLINK, flags, protocol) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made it for us.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut request = Vec::with_capacity(HEADER + payload.len());
    request.extend_from_slice(&((HEADER + payload.len()) as u32).to_ne_bytes());
    request.extend_from_slice(&kind.to_ne_bytes());
    let dump = (libc::NLM_F_REQUEST | libc::NLM_F_DUMP) as u16;
    request.extend_from_slice(&dump.to_ne_bytes());
    request.extend_from_slice(&[0; 8]);
    request.extend_from_slice(payload);
    // SAFETY: a buffer and its length; an unconnected netlink socket sends to the kernel.
    let sent = unsafe {
        let to = request.as_ptr().cast();
        libc::send(socket.as_raw_fd(), to, request.len(), 0)
    };
    if sent < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut buffer = vec![0u8; 64 * 1024];
    loop {
        // SAFETY: a buffer and its length.
        let got = unsafe {
            let to = buffer.as_mut_ptr().cast();
            libc::recv(socket.as_raw_fd(), to, buffer.len(), 0)
        };
        let Ok(got) = usize::try_from(got) else {
            return Err(io::Error::last_os_error());
        };
        let mut rest = &buffer[..got];
        while let Some(head) = rest.first_chunk::<HEADER>() {
            let length = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]) as usize;
            let kind = u16::from_ne_bytes([head[4], head[5]]);
            let Some(body) = rest.get(HEADER..length) else {
                return Err(io::ErrorKind::InvalidData.into());
            };
            match kind {
                NLMSG_DONE => return Ok(()),
                NLMSG_ERROR => {
                    let code = body.first_chunk().map_or(0, |b| i32::from_ne_bytes(*b));
                    return Err(io::Error::from_raw_os_error(-code));
                }
                kind => visit(kind, body),
            }
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        }
        if got == 0 {
            return Ok(());
        }
    }
}
