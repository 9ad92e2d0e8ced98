from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PEER_ROLE_UNSPECIFIED: _ClassVar[PeerRole]
    PEER_ROLE_SCHEDULER: _ClassVar[PeerRole]
    PEER_ROLE_WORKER: _ClassVar[PeerRole]
    PEER_ROLE_TOOL: _ClassVar[PeerRole]
PEER_ROLE_UNSPECIFIED: PeerRole
PEER_ROLE_SCHEDULER: PeerRole
PEER_ROLE_WORKER: PeerRole
PEER_ROLE_TOOL: PeerRole

class CompanionRequest(_message.Message):
    __slots__ = ("hello", "offer_memory", "get_page")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OFFER_MEMORY_FIELD_NUMBER: _ClassVar[int]
    GET_PAGE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    offer_memory: OfferMemory
    get_page: GetPage
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., offer_memory: _Optional[_Union[OfferMemory, _Mapping]] = ..., get_page: _Optional[_Union[GetPage, _Mapping]] = ...) -> None: ...

class CompanionResponse(_message.Message):
    __slots__ = ("welcome", "memory_accepted", "page", "rank_channel", "error")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    RANK_CHANNEL_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    memory_accepted: MemoryAccepted
    page: PageGranted
    rank_channel: RankChannel
    error: CompanionError
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., memory_accepted: _Optional[_Union[MemoryAccepted, _Mapping]] = ..., page: _Optional[_Union[PageGranted, _Mapping]] = ..., rank_channel: _Optional[_Union[RankChannel, _Mapping]] = ..., error: _Optional[_Union[CompanionError, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("role", "program")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    role: PeerRole
    program: str
    def __init__(self, role: _Optional[_Union[PeerRole, str]] = ..., program: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: str
    def __init__(self, token: _Optional[str] = ...) -> None: ...

class OfferMemory(_message.Message):
    __slots__ = ("memory_token", "device_memory")
    MEMORY_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    memory_token: int
    device_memory: bool
    def __init__(self, memory_token: _Optional[int] = ..., device_memory: bool = ...) -> None: ...

class MemoryAccepted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPage(_message.Message):
    __slots__ = ("namespace_id",)
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    def __init__(self, namespace_id: _Optional[int] = ...) -> None: ...

class PageGranted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankChannel(_message.Message):
    __slots__ = ("registration_id",)
    REGISTRATION_ID_FIELD_NUMBER: _ClassVar[int]
    registration_id: int
    def __init__(self, registration_id: _Optional[int] = ...) -> None: ...

class CompanionError(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
