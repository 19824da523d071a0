"""The endpoints below /api/v1: the contract, lists, operators' calls, and the document that describes them."""
