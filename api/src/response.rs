//! Responses and their bodies.
use std::{
    pin::Pin,
    task::{Context, Poll},
};

use hyper::{
    Response as HyperResponse, StatusCode,
    body::{Body, Bytes, Frame},
    header::{CONTENT_TYPE, HeaderValue},
};
use serde::Serialize;
use tokio::sync::mpsc;

/// Media type of JSON.
pub(crate) const JSON: &str = "application/json";
/// Media type of OpenMetrics, Prometheus' text format.
pub const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Media type of pcapng, which has none of its own with IANA.
pub(crate) const PCAPNG: &str = "application/x-pcapng";

/// A response of the API.
pub(crate) type Response = HyperResponse<Content>;

/// Body of a response.
#[derive(Debug)]
pub(crate) enum Content {
    /// All of it; `None` once it was taken.
    Whole(Option<Bytes>),
    /// Parts as they come, until the sender is dropped.
    Parts(mpsc::Receiver<Bytes>),
    /// Parts of a text that is whole only with its last one.
    Document(mpsc::Receiver<Part>),
}

/// A part of a document.
#[derive(Debug)]
pub(crate) enum Part {
    /// More follows.
    More(Bytes),
    /// Nothing follows.
    Last(Bytes),
}

/// Error: the sender of a document was dropped before its last part. The connection is cut, so that no
/// client takes what it has for all there is.
#[derive(thiserror::Error, Clone, Copy, PartialEq, Eq, Debug)]
#[error("the answer broke off before its end")]
pub(crate) struct BrokeOff;

/// A response whose body is JSON.
pub(crate) fn json(
    status: StatusCode,
    media_type: &'static str,
    body: &impl Serialize,
) -> Response {
    // A map with keys that are no texts would be no JSON; there is none.
    let bytes = serde_json::to_vec(body).unwrap_or_default();
    with(status, media_type, Content::Whole(Some(bytes.into())))
}

/// A response without a body.
pub(crate) fn empty(status: StatusCode) -> Response {
    let mut response = HyperResponse::new(Content::Whole(None));
    *response.status_mut() = status;
    response
}

/// A response with a body of this media type.
pub(crate) fn with(status: StatusCode, media_type: &'static str, body: Content) -> Response {
    let mut response = HyperResponse::new(body);
    *response.status_mut() = status;
    let media_type = HeaderValue::from_static(media_type);
    response.headers_mut().insert(CONTENT_TYPE, media_type);
    response
}

impl Body for Content {
    type Data = Bytes;
    type Error = BrokeOff;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokeOff>>> {
        match &mut *self {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Parts(parts) => {
                let next = parts.poll_recv(cx);
                next.map(|part| part.map(|part| Ok(Frame::data(part))))
            }
            Self::Document(parts) => parts.poll_recv(cx).map(|part| {
                Some(match part {
                    Some(Part::More(text)) => Ok(Frame::data(text)),
                    Some(Part::Last(text)) => {
                        *self = Self::Whole(None);
                        Ok(Frame::data(text))
                    }
                    None => Err(BrokeOff),
                })
            }),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(None))
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        match self {
            Self::Whole(bytes) => {
                hyper::body::SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64)
            }
            Self::Parts(_) | Self::Document(_) => hyper::body::SizeHint::default(),
        }
    }
}
